"""holdfast: a durable execution queue and worker runtime. Your database is the queue; your jobs outlive your workers.

General layout: `model`, `errors`, `timing` and `submission` are plain values; `store` is the only place that knows SQL;
`runner` runs jobs and knows no queue; `pipeline` plans tasks and stores snapshots; `duties` is the periodic work;
`worker` claims, runs and finishes; `api` is the service; `client` is for applications; `cli` is the command line;
`assemble` puts a worker together, `assemble_service` the service. Data flows one way, and imports point down only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.assemble_service import asgi
    from holdfast.client.app import Holdfast
    from holdfast.client.blocking import Client
    from holdfast.client.http import AsyncClient
    from holdfast.runner.function import Cancelled, Context
    from holdfast.store.submit_in_transaction import submit_inside, submit_inside_async

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "Cancelled",
    "Client",
    "Context",
    "Holdfast",
    "asgi",
    "submit_inside",
    "submit_inside_async",
]

_HOMES = {
    "AsyncClient": "holdfast.client.http",
    "Cancelled": "holdfast.runner.function",
    "Client": "holdfast.client.blocking",
    "Context": "holdfast.runner.function",
    "Holdfast": "holdfast.client.app",
    "asgi": "holdfast.assemble_service",
    "submit_inside": "holdfast.store.submit_in_transaction",
    "submit_inside_async": "holdfast.store.submit_in_transaction",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are asked for, so that `import holdfast` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
