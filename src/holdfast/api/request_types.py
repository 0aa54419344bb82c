"""Bodies, queries and answers of the HTTP API that are not in `model`, each defined once.

Requests are checked against these, and the OpenAPI document is made from them.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.model import (
    Attempt,
    AuditEntry,
    Check,
    Event,
    Json,
    Lane,
    Role,
    RunnerName,
    Snapshot,
    Status,
    TaskRecord,
    WorkerRecord,
)
from holdfast.response_types import ArtifactView, JobView, QueueView, ToolView
from holdfast.runner_specs import Name
from holdfast.store.queues import MOST
from holdfast.store.snapshots import Totals
from holdfast.submission import FIRST_YEAR, LAST_YEAR, Submission

BIGGEST = 2**63 - 1
Limit = Annotated[int, Meta(ge=1, le=1000)]
After = Annotated[int, Meta(ge=0, le=BIGGEST)]
Time = Annotated[datetime, Meta(tz=True, description=f"with a time zone, years {FIRST_YEAR} to {LAST_YEAR}")]
Cap = Annotated[int, Meta(ge=1, le=MOST)] | None


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's body."""


class QueryParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's query."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer's body."""


class NoParameters(QueryParameters, frozen=True):
    pass


class EmptyBody(Body, frozen=True):
    """No field; the body may be left out."""


# Jobs


class UploadForm(Body, frozen=True):
    """Files, each a part with a file name, which may be a relative path."""

    file: Sequence[bytes]


class UploadedFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size: int


class UploadView(Answer, frozen=True):
    upload: str
    files: Sequence[UploadedFile]


class JobRequest(Submission, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job: `runner` and `spec`; or the name of a `tool`; or `runner` and `tasks`, a pipeline."""

    runner: RunnerName | None = None  # type: ignore[assignment]
    spec: dict[str, Any] | None = None  # type: ignore[assignment]
    tool: Name | None = None
    plan_only: bool = False


class BulkRequest(Body, frozen=True):
    jobs: Annotated[list[JobRequest], Meta(min_length=1, max_length=10_000)]


class JobIds(Answer, frozen=True):
    ids: Sequence[str]


class JobList(Answer, frozen=True):
    items: Sequence[JobView]
    next_cursor: str | None


class ListJobs(QueryParameters, frozen=True):
    id: Annotated[
        str | None, Meta(description="the beginning of an id, or at least its last 6 digits; other filters are ignored")
    ] = None
    status: Sequence[Status] = ()
    kind: str | None = None
    queue: str | None = None
    lane: str | None = None
    label: Annotated[Sequence[str], Meta(description="key:value")] = ()
    since: Time | None = None
    until: Time | None = None
    limit: Limit = 100
    cursor: str | None = None


class AttemptList(Answer, frozen=True):
    items: Sequence[Attempt]


class TaskList(Answer, frozen=True):
    items: Sequence[TaskRecord]


class ArtifactList(Answer, frozen=True):
    items: Sequence[ArtifactView]


class ListEvents(QueryParameters, frozen=True):
    after: After = 0
    limit: Limit = 1000
    follow: bool = False


class EventList(Answer, frozen=True):
    items: Sequence[Event]
    next_after: int | None


class StreamEvents(QueryParameters, frozen=True):
    after: After = 0


class CallerReason(Body, frozen=True):
    reason: str | None = None


class ResumeJob(Body, frozen=True):
    reason: str | None = None
    budget: dict[Name, Annotated[float, Meta(ge=0)]] | None = None
    stopped: bool = False


class ResolveJob(Body, frozen=True):
    result: Json = None
    reason: str | None = None


class DeleteJob(QueryParameters, frozen=True):
    force: bool = False
    dry_run: bool = False
    reason: str | None = None


class DeletedJob(Answer, frozen=True):
    outcome: Literal["deleted", "deleting", "would_delete"]


# Snapshots


class ListSnapshots(QueryParameters, frozen=True):
    limit: Limit = 100
    cursor: str | None = None


class SnapshotList(Answer, frozen=True):
    """A page of the tenant's snapshots, and the totals of all of them."""

    items: Sequence[Snapshot]
    next_cursor: str | None
    totals: Totals


class UsedSnapshot(Snapshot, frozen=True, kw_only=True):
    """A snapshot for a caller that reads its folder; `shared_folder` is the id of the shared folder that has it."""

    shared_folder: str


class DeleteSnapshot(QueryParameters, frozen=True):
    force: bool = False
    recurse: bool = False
    dry_run: bool = False


class DeletedSnapshots(Answer, frozen=True):
    """Which snapshots were or would be removed, and their size in bytes."""

    outcome: Literal["deleted", "would_delete"]
    snapshots: Sequence[str]
    size: int


# Lanes, queues, workers, tools, tokens


class ListLanes(QueryParameters, frozen=True):
    limit: Limit = 100
    cursor: str | None = None


class LaneList(Answer, frozen=True):
    items: Sequence[Lane]
    next_cursor: str | None


class PutLane(Body, frozen=True):
    check: Check | None


class QueueList(Answer, frozen=True):
    items: Sequence[QueueView]


class PatchQueue(Body, frozen=True):
    max_running: Cap | msgspec.UnsetType = msgspec.UNSET
    max_depth: Cap | msgspec.UnsetType = msgspec.UNSET


class WorkerList(Answer, frozen=True):
    items: Sequence[WorkerRecord]


class DrainedWorkers(Answer, frozen=True):
    workers: Sequence[str]


class ToolList(Answer, frozen=True):
    items: Sequence[ToolView]


class TokenView(Answer, frozen=True):
    id: str
    name: str
    role: Role
    tenant: str | None
    created_at: datetime
    expires_at: datetime | None
    created_by: str | None
    used_at: datetime | None


class TokenList(Answer, frozen=True):
    items: Sequence[TokenView]


class NewToken(Body, frozen=True):
    name: Name
    role: Role
    tenant: Name | None = None
    expires_at: Time | None = None


class CreatedToken(TokenView, frozen=True):
    """`token` is the secret. It is shown only once."""

    token: str


class ListAudit(QueryParameters, frozen=True):
    who: Annotated[str | None, Meta(description="a name, as in `actor`, or the id of a token")] = None
    what: Annotated[str | None, Meta(description="an action, such as `token.remove`, or its first word")] = None
    since: Time | None = None
    limit: Limit = 100
    cursor: str | None = None


class AuditList(Answer, frozen=True):
    items: Sequence[AuditEntry]
    next_cursor: str | None


class DeletedToken(Answer, frozen=True):
    outcome: Literal["deleted"] = "deleted"


class Health(Answer, frozen=True):
    status: Literal["ok", "ready"]


class Ready(Health, frozen=True):
    workers: int
    warnings: Sequence[str]
