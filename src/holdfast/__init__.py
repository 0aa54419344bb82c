"""holdfast: a durable execution queue and worker runtime. Your database is the queue; your jobs outlive your workers.

General layout: `model`, `errors`, `timing` and `submission` are plain values; `store` is the only place that knows SQL;
`runner` runs jobs and knows no queue; `pipeline` plans tasks and stores snapshots; `duties` is the periodic work;
`worker` claims, runs and finishes; `api` is the service; `client` is for applications; `cli` is the command line;
`assemble` puts a worker together, `assemble_service` the service. Data flows one way, and imports point down only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import errors
    from holdfast.assemble_service import asgi
    from holdfast.client.app import Holdfast
    from holdfast.client.async_client import AsyncClient
    from holdfast.client.blocking import Client
    from holdfast.client.builders import Builder, Call, Container, Pipeline, Process, Task
    from holdfast.client.embedded_worker import EmbeddedWorker
    from holdfast.client.functions import Function
    from holdfast.client.http_errors import Refused
    from holdfast.client.job import Job
    from holdfast.client.options import JobOptions, Retry
    from holdfast.client.outage import ServerUnreachable
    from holdfast.client.sync_app import SyncHoldfast
    from holdfast.client.sync_job import SyncJob
    from holdfast.errors import (
        AtCapacity,
        BadRequest,
        CacheFull,
        ConfigError,
        Conflict,
        DiskFull,
        FieldForbidden,
        Forbidden,
        HoldfastError,
        IllegalMove,
        Invalid,
        JobCancelled,
        JobFailed,
        JobNotEnded,
        JobPaused,
        JobTimedOut,
        LockTimeout,
        NeedFailed,
        NoResult,
        NotFound,
        NotReady,
        QueueFull,
        QueueOff,
        QueuePaused,
        RangeNotSatisfiable,
        RateLimited,
        ReplayedJobDeleted,
        RequestTimeout,
        SchemaMismatch,
        SharedFolderUnavailable,
        SnapshotDamaged,
        SnapshotFailed,
        SnapshotInUse,
        StorageUnavailable,
        StoreError,
        StoreFull,
        StoreUnreachable,
        TooLarge,
        TooManyStreams,
        Unauthorized,
    )
    from holdfast.model import Attempt, Event, Status, TaskRecord
    from holdfast.model import Job as JobRecord
    from holdfast.response_types import Explanation
    from holdfast.runner.artifacts import Artifact
    from holdfast.runner.function import Cancelled, CancelToken, Context
    from holdfast.store.submit_in_transaction import submit_inside, submit_inside_async
    from holdfast.submission import Accepted

__version__ = "0.2.0"
__all__ = [
    "Accepted",
    "Artifact",
    "AsyncClient",
    "AtCapacity",
    "Attempt",
    "BadRequest",
    "Builder",
    "CacheFull",
    "Call",
    "CancelToken",
    "Cancelled",
    "Client",
    "ConfigError",
    "Conflict",
    "Container",
    "Context",
    "DiskFull",
    "EmbeddedWorker",
    "Event",
    "Explanation",
    "FieldForbidden",
    "Forbidden",
    "Function",
    "Holdfast",
    "HoldfastError",
    "IllegalMove",
    "Invalid",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobNotEnded",
    "JobOptions",
    "JobPaused",
    "JobRecord",
    "JobTimedOut",
    "LockTimeout",
    "NeedFailed",
    "NoResult",
    "NotFound",
    "NotReady",
    "Pipeline",
    "Process",
    "QueueFull",
    "QueueOff",
    "QueuePaused",
    "RangeNotSatisfiable",
    "RateLimited",
    "Refused",
    "ReplayedJobDeleted",
    "RequestTimeout",
    "Retry",
    "SchemaMismatch",
    "ServerUnreachable",
    "SharedFolderUnavailable",
    "SnapshotDamaged",
    "SnapshotFailed",
    "SnapshotInUse",
    "Status",
    "StorageUnavailable",
    "StoreError",
    "StoreFull",
    "StoreUnreachable",
    "SyncHoldfast",
    "SyncJob",
    "Task",
    "TaskRecord",
    "TooLarge",
    "TooManyStreams",
    "Unauthorized",
    "asgi",
    "errors",
    "submit_inside",
    "submit_inside_async",
]

_MODULES = {
    "holdfast.assemble_service": ("asgi",),
    "holdfast.client.app": ("Holdfast",),
    "holdfast.client.async_client": ("AsyncClient",),
    "holdfast.client.blocking": ("Client",),
    "holdfast.client.builders": ("Builder", "Call", "Container", "Pipeline", "Process", "Task"),
    "holdfast.client.embedded_worker": ("EmbeddedWorker",),
    "holdfast.client.functions": ("Function",),
    "holdfast.client.http_errors": ("Refused",),
    "holdfast.client.job": ("Job",),
    "holdfast.client.options": ("JobOptions", "Retry"),
    "holdfast.client.outage": ("ServerUnreachable",),
    "holdfast.client.sync_app": ("SyncHoldfast",),
    "holdfast.client.sync_job": ("SyncJob",),
    "holdfast.model": ("Attempt", "Event", "JobRecord", "Status", "TaskRecord"),
    "holdfast.response_types": ("Explanation",),
    "holdfast.runner.artifacts": ("Artifact",),
    "holdfast.runner.function": ("CancelToken", "Cancelled", "Context"),
    "holdfast.store.submit_in_transaction": ("submit_inside", "submit_inside_async"),
    "holdfast.submission": ("Accepted",),
}
"""Where the public names are defined; all others are errors."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the public names when they are asked for, so that `import holdfast` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_HOMES.get(name, "holdfast.errors"))
    return module if name == "errors" else getattr(module, "Job" if name == "JobRecord" else name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
