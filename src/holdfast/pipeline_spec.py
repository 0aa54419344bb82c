"""The specification of a pipeline: its tasks, its base, and which snapshots are stored. No file is read here.

A caller gives `tasks`, `connector`, `snapshot` and `base` beside `runner` and `spec`; they are stored inside the spec,
so that the worker that leases the job has all of it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast import decoding
from holdfast.errors import Invalid

ConnectorName = Annotated[str, Meta(min_length=1, max_length=63)]
"""The name of a connector in the registry."""
SnapshotMode = Literal["always", "final", "none"]
Text = Annotated[str, Meta(max_length=32_768)]
TaskName = Annotated[str, Meta(min_length=1, max_length=64)]
SnapshotId = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
MAX_TASKS = 1000
PIPELINE_FIELDS = ("tasks", "connector", "snapshot", "base")
NO_UPLOADS = (
    "are not for pipelines: a result is known by what its tasks declare; put files below the sources, and name them"
)


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One task: a command, or a SQL file for the connector's server. Paths are below the tenant's sources."""

    name: TaskName
    command: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=4096)] | None = None
    sql: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    files: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=4096)], ...], Meta(max_length=1000)] = ()
    env: dict[Annotated[str, Meta(min_length=1, max_length=200)], Text] = {}
    timeout: Annotated[float, Meta(gt=0, le=10 * 366 * 86_400)] | None = None


class PipelineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a pipeline's spec that is the same for every runner."""

    tasks: Annotated[tuple[TaskSpec, ...], Meta(min_length=1, max_length=MAX_TASKS)]
    connector: ConnectorName = "files"
    snapshot: SnapshotMode = "always"
    base: SnapshotId | None = None
    env: dict[Annotated[str, Meta(min_length=1, max_length=200)], Text] = {}

    def keeps(self, n: int) -> bool:
        """Return whether the nth task, from 0, stores a snapshot."""
        return self.snapshot == "always" or (self.snapshot == "final" and n == len(self.tasks) - 1)


def pipeline_of(spec: Mapping[str, Any]) -> PipelineSpec | None:
    """Return the pipeline in the spec of a job; None for any other job."""
    return decoding.convert(spec, PipelineSpec) if "tasks" in spec else None


def refuse_odd_tasks(pipeline: PipelineSpec, *, sql: bool) -> None:
    """Refuse tasks that the types accept but that are invalid. `sql`: the connector's tasks may be SQL files."""
    names: set[str] = set()
    for n, task in enumerate(pipeline.tasks):
        where = f"tasks[{n}]"
        if not task.name.isprintable():
            raise Invalid(f"{where}.name", "has control characters")
        if task.name in names:
            raise Invalid(f"{where}.name", f"{task.name!r} is the name of an earlier task; names are given once")
        names.add(task.name)
        if (task.command is None) == (task.sql is None):
            raise Invalid(where, "needs one of: command, sql")
        if task.sql is not None and not sql:
            raise Invalid(f"{where}.sql", f'connector {pipeline.connector} has no server for SQL: say "postgres"')
