"""Makes the plan of a pipeline: for every task what it runs, what its result depends on, and the id of its snapshot.

Planning only reads files. What depends on where the pipeline runs is passed in as `PlanFacts`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import Invalid
from holdfast.model import Json
from holdfast.pipeline.identity import Components, root_of, snapshot_id, task_hash, text_hash
from holdfast.pipeline.sources import DeclaredFile, LineOrigin, Sources
from holdfast.pipeline_spec import ConnectorName, PipelineSpec, SnapshotMode, TaskSpec, pipeline_of
from holdfast.registry import connector_named

SCHEMA = "2"
"""Part of every identity: raise it when older snapshots can no longer be reused."""


class PlanFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What depends on where the pipeline runs: the digest of the image, the version of the connector's server.

    `image` is None for processes; `engine` is None without a server, or if the image determines it.
    """

    image: str | None = None
    engine: str | None = None


class TaskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a plan. `snapshot` is the id of its result, `keep` tells whether to store it.

    `sql` is the expanded text, which is run exactly as it was hashed.
    """

    n: int
    name: str
    command: tuple[str, ...] | None
    sql: str | None
    origins: tuple[LineOrigin, ...] = ()
    """Where the lines of `sql` come from, for error messages; not part of the task's identity."""
    files: tuple[DeclaredFile, ...]
    env: Mapping[str, str]
    timeout: float | None
    components: Components
    hash: str
    parent: str
    snapshot: str
    keep: bool


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    connector: ConnectorName
    mode: SnapshotMode
    base: str | None
    tasks: tuple[TaskPlan, ...]

    @property
    def hash(self) -> str:
        """The identity of the plan: ids are chained, so the last one covers all."""
        return self.tasks[-1].snapshot

    def latest(self, existing: "frozenset[str] | set[str]") -> int:
        """Return how many tasks the latest existing snapshot covers: where to continue."""
        return next((task.n + 1 for task in reversed(self.tasks) if task.snapshot in existing), 0)


def make_plan(
    spec: Mapping[str, Any],
    sources: Sources,
    facts: PlanFacts,
    *,
    tenant: str,
    inputs: Json,
    secrets: Sequence[str] = (),
) -> PipelinePlan:
    """Plan a job's pipeline, without side effects. Every error names the field. `secrets` are names."""
    pipeline = pipeline_of(spec)
    if pipeline is None:
        raise Invalid("tasks", "this job is not a pipeline")
    if "image" in spec and facts.image is None:
        raise Invalid("spec.image", f"{spec['image']} does not resolve to a digest")
    shared = shared_components(pipeline.connector, facts, inputs, secrets)
    return PipelinePlan(
        tenant=tenant,
        connector=pipeline.connector,
        mode=pipeline.snapshot,
        base=pipeline.base,
        tasks=tuple(_tasks(pipeline, sources, shared, tenant)),
    )


def stage_files(task: TaskPlan, sources: Sources, folder: Path) -> None:
    """Copy a task's declared files into a folder under their own paths; refuse one that changed since."""
    for n, file in enumerate(task.files):
        sources.copy(f"tasks[{task.n}].files[{n}]", file, folder / _inside(file.path))


def _inside(path: str) -> Path:
    """Return a path below a folder: `..` was checked to stay inside the inputs, and must stay inside the copy."""
    parts: list[str] = []
    for part in Path(path.lstrip("/")).parts:
        if part == "..":
            parts = parts[:-1]
        else:
            parts.append(part)
    return Path(*parts)


def _tasks(pipeline: PipelineSpec, sources: Sources, shared: Components, tenant: str) -> Iterator[TaskPlan]:
    parent = pipeline.base or root_of(tenant)
    for n, task in enumerate(pipeline.tasks):
        where = f"tasks[{n}]"
        sql, origins = (None, ()) if task.sql is None else sources.sql(f"{where}.sql", task.sql)
        files = tuple(sources.declared(f"{where}.files[{m}]", path) for m, path in enumerate(task.files))
        env = {**pipeline.env, **task.env}
        components = {**shared, **components_of(task, sql, files, env)}
        hashed = task_hash(components)
        made = snapshot_id(parent, hashed)
        yield TaskPlan(
            n=n,
            name=task.name,
            command=task.command,
            sql=sql,
            origins=origins,
            files=files,
            env=env,
            timeout=task.timeout,
            components=components,
            hash=hashed,
            parent=parent,
            snapshot=made,
            keep=pipeline.keeps(n),
        )
        parent = made


def shared_components(connector: ConnectorName, facts: PlanFacts, inputs: Json, secrets: Sequence[str]) -> Components:
    """Return the components that all tasks of a job share. Without inputs or secrets there is no such component."""
    found = {"schema": SCHEMA, "connector": connector_named(connector).identity}
    if facts.image is not None:
        found["image"] = facts.image
    if facts.engine is not None:
        found["engine"] = facts.engine
    if inputs != {}:
        # A database may change the order of keys, which does not change the JSON value.
        found["inputs"] = text_hash(msgspec.json.encode(inputs, order="deterministic").decode())
    if secrets:
        found["secrets"] = text_hash(*sorted(set(secrets)))
    return found


def components_of(task: TaskSpec, sql: str | None, files: Sequence[DeclaredFile], env: Mapping[str, str]) -> Components:
    """Return the components of one task by name. Values that may be long or private are hashed."""
    found: dict[str, str] = {}
    if task.command is not None:
        found["command"] = text_hash(*task.command)
    if sql is not None:
        found["sql"] = text_hash(sql)
    # By position, not by name: a renamed file is the same file, two swapped files are not.
    found |= {f"files[{n}]": file.digest for n, file in enumerate(files)}
    found |= {f"env.{name}": text_hash(value) for name, value in env.items()}
    return found
