"""A pipeline becomes a plan: for every task what it runs, what its result depends on, and the id of its snapshot.

Planning reads files and nothing else. What only the place of execution knows comes in as `Facts`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import Invalid
from holdfast.model import Json
from holdfast.pipeline.identity import Components, root_of, snapshot_id, task_hash, text_hash
from holdfast.pipeline.sources import Declared, Sources
from holdfast.tasks import Connector, Mode, Pipeline, Task, pipeline_of

SCHEMA = "2"
"""Part of every identity: raise it when a snapshot made before can no longer stand for one made now."""
CONNECTORS: Mapping[Connector, str] = {"files": "files 1", "postgres": "postgres 1"}
"""How a connector leaves a workspace, in versions: a change makes new snapshots."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is true where the pipeline runs: the digest behind the image's tag, the version of the connector's server.

    `image` is None for processes; `engine` is None where there is no server, or where the image says it all.
    """

    image: str | None = None
    engine: str | None = None


class TaskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a plan. `snapshot` is the id that its result has, `keep` whether it is to be stored.

    `sql` is the expanded text, to be run as it stands here: what was hashed is what runs.
    """

    n: int
    name: str
    command: tuple[str, ...] | None
    sql: str | None
    files: tuple[Declared, ...]
    env: Mapping[str, str]
    timeout: float | None
    components: Components
    hash: str
    parent: str
    snapshot: str
    keep: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    connector: Connector
    mode: Mode
    base: str | None
    tasks: tuple[TaskPlan, ...]

    @property
    def hash(self) -> str:
        """The same for the same plan: ids are chained, so the last one stands for all."""
        return self.tasks[-1].snapshot

    def latest(self, existing: "frozenset[str] | set[str]") -> int:
        """How many tasks from the first are done by the latest snapshot that exists: where to go on."""
        return next((task.n + 1 for task in reversed(self.tasks) if task.snapshot in existing), 0)


def plan(
    spec: Mapping[str, Any],
    sources: Sources,
    facts: Facts,
    *,
    tenant: str,
    inputs: Json,
    secrets: Sequence[str] = (),
) -> Plan:
    """Plan a job's pipeline. Every refusal names the field, and nothing has happened. `secrets` are names."""
    pipeline = pipeline_of(spec)
    if pipeline is None:
        raise Invalid("tasks", "this job is no pipeline")
    if "image" in spec and facts.image is None:
        raise Invalid("spec.image", f"{spec['image']} does not resolve to a digest")
    shared = shared_components(pipeline.connector, facts, inputs, secrets)
    return Plan(
        tenant=tenant,
        connector=pipeline.connector,
        mode=pipeline.snapshot,
        base=pipeline.base,
        tasks=tuple(_tasks(pipeline, sources, shared, tenant)),
    )


def stage(task: TaskPlan, sources: Sources, folder: Path) -> None:
    """Put a task's declared files into a folder under their own paths; one that changed since is refused."""
    for n, file in enumerate(task.files):
        sources.copy(f"tasks[{task.n}].files[{n}]", file, folder / _inside(file.path))


def _inside(path: str) -> Path:
    """The path below a folder: `..` has been shown to stay inside the inputs, and must stay inside the copy."""
    parts: list[str] = []
    for part in Path(path.lstrip("/")).parts:
        if part == "..":
            parts = parts[:-1]
        else:
            parts.append(part)
    return Path(*parts)


def _tasks(pipeline: Pipeline, sources: Sources, shared: Components, tenant: str) -> Iterator[TaskPlan]:
    parent = pipeline.base or root_of(tenant)
    for n, task in enumerate(pipeline.tasks):
        where = f"tasks[{n}]"
        sql = None if task.sql is None else sources.sql(f"{where}.sql", task.sql)
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


def shared_components(connector: Connector, facts: Facts, inputs: Json, secrets: Sequence[str]) -> Components:
    """What the result of every task of a job depends on. No inputs, or no secrets, are no component."""
    found = {"schema": SCHEMA, "connector": CONNECTORS[connector]}
    if facts.image is not None:
        found["image"] = facts.image
    if facts.engine is not None:
        found["engine"] = facts.engine
    if inputs != {}:
        # A database may change the order of names; as JSON that is the same.
        found["inputs"] = text_hash(msgspec.json.encode(inputs, order="deterministic").decode())
    if secrets:
        found["secrets"] = text_hash(*sorted(set(secrets)))
    return found


def components_of(task: Task, sql: str | None, files: Sequence[Declared], env: Mapping[str, str]) -> Components:
    """What a task's own result depends on, by name. Values are hashes where they may be long or private."""
    found: dict[str, str] = {}
    if task.command is not None:
        found["command"] = text_hash(*task.command)
    if sql is not None:
        found["sql"] = text_hash(sql)
    # By place, not by name: a renamed file is the same file, two that were swapped are not.
    found |= {f"files[{n}]": file.digest for n, file in enumerate(files)}
    found |= {f"env.{name}": text_hash(value) for name, value in env.items()}
    return found
