"""The tasks of a pipeline job: planned in one go, then moved one by one, by whoever leases the job and nobody else.

Until a worker has planned them there are no rows: a waiting pipeline's tasks are told from its spec.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import NotFound
from holdfast.model import Job, Json, Lease, TaskRecord, TaskStatus
from holdfast.store.database import Database, Row, Tx, json_text
from holdfast.store.rows import known_id
from holdfast.tasks import pipeline_of


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task as a plan has it."""

    name: str
    parent: str
    snapshot: str


class Tasks:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self, job_id: str, *, tenant: str = "default") -> Sequence[TaskRecord]:
        """The tasks of a job, in order; none for a job that is no pipeline."""
        found = await self._database.read("get_job", id=known_id(job_id), tenant=tenant)
        if not found:
            raise NotFound("job", job_id)
        return await self._of(found[0]["id"], msgspec.json.decode(found[0]["spec"]))

    async def of(self, job: Job) -> Sequence[TaskRecord]:
        """Like `list`, for a job that was read already."""
        return await self._of(job.id, job.spec)

    async def of_all(self, jobs: Sequence[Job]) -> Mapping[str, Sequence[TaskRecord]]:
        """The tasks of jobs that were read already, by their ids: one statement, none if there is no pipeline."""
        pipelines = [job for job in jobs if "tasks" in job.spec]
        if not pipelines:
            return {}
        known: dict[str, list[TaskRecord]] = {}
        for row in await self._database.read("tasks_of_jobs", ids=[job.id for job in pipelines]):
            known.setdefault(row["job_id"], []).append(_to_task(row))
        return {job.id: known.get(job.id) or _waiting(job.spec) for job in pipelines}

    async def _of(self, job_id: str, spec: Mapping[str, Any]) -> Sequence[TaskRecord]:
        if "tasks" not in spec:
            return []
        rows = await self._database.read("list_tasks", id=job_id)
        return [_to_task(row) for row in rows] or _waiting(spec)

    async def replan(self, lease: Lease, tasks: Sequence[PlannedTask], *, done: int) -> bool:
        """Put a plan in the place of the one that was there, in one transaction; False: the lease is lost.

        The first `done` tasks are in the workspace: what this job ran stays as it was told, the rest was cached. All
        behind them are pending, also what had succeeded on a workspace that is lost. Snapshots in the plan are used
        from now on, and not evicted.
        """

        async def change(tx: Tx) -> bool:
            if not await tx.rows("lock_lease", id=lease.id, token=lease.token):
                return False
            before = [_to_task(row) for row in await tx.rows("list_tasks", id=lease.id)]
            wanted = _merged(before, tasks, done)
            used = sorted({task.snapshot for task in tasks} | {task.parent for task in tasks})
            await tx.rows("use_snapshots", ids=used, tenant=lease.tenant)
            if wanted == before:
                return True
            await tx.rows("delete_tasks", id=lease.id)
            await tx.rows("insert_tasks", rows=[{"job_id": lease.id, **_row(task)} for task in wanted])
            await tx.rows("note", id=lease.id, events=_told(before, wanted))
            return True

        return await self._database.transact(change)

    async def write(
        self,
        lease: Lease,
        n: int,
        status: TaskStatus,
        *,
        cached: bool = False,
        exit_code: int | None = None,
        ago: float = 0.0,
    ) -> bool:
        """Say where a task stands, with the event that reports it; False: the lease is lost. Twice is once.

        `ago` is how many seconds have passed since it ended: a duration, so that nobody's clock has to be right.
        """

        async def change(tx: Tx) -> bool:
            if not await tx.rows("lock_lease", id=lease.id, token=lease.token):
                return False
            said = {"status": status, "cached": cached, "exit_code": exit_code, "ago": ago}
            for row in await tx.rows("write_task", id=lease.id, n=n, **said):
                event = _event(row["name"], status=status, cached=cached or None, exit_code=exit_code)
                await tx.rows("note", id=lease.id, events=[event])
            return True

        return await self._database.transact(change)


def _waiting(spec: Mapping[str, Any]) -> list[TaskRecord]:
    """The tasks of a spec that nobody has planned. One that came by SQL may be no pipeline: its worker will say so."""
    try:
        pipeline = pipeline_of(spec)
    except msgspec.ValidationError:
        return []
    return [TaskRecord(n=n, name=task.name) for n, task in enumerate(pipeline.tasks)] if pipeline else []


def _merged(before: Sequence[TaskRecord], tasks: Sequence[PlannedTask], done: int) -> list[TaskRecord]:
    """The new plan, with what this job did itself as far as it still counts."""
    ran = {(task.n, task.name, task.snapshot): task for task in before if task.status is TaskStatus.SUCCEEDED}
    merged: list[TaskRecord] = []
    for n, task in enumerate(tasks):
        planned = TaskRecord(n=n, name=task.name, parent=task.parent, snapshot=task.snapshot)
        if n >= done:
            merged.append(planned)
        else:
            cached = msgspec.structs.replace(planned, status=TaskStatus.SUCCEEDED, cached=True)
            merged.append(ran.get((n, task.name, task.snapshot), cached))
    return merged


def _told(before: Sequence[TaskRecord], wanted: Sequence[TaskRecord]) -> list[dict[str, str]]:
    """What a new plan says in the history: the plan, then each task that needs no run."""
    plan = _event(None, plan=wanted[-1].snapshot, tasks=[task.name for task in wanted], replanned=bool(before) or None)
    known = {(task.name, task.snapshot) for task in before if task.cached}
    return [
        plan,
        *(
            _event(task.name, status=task.status, cached=True, snapshot=task.snapshot)
            for task in wanted
            if task.cached and (task.name, task.snapshot) not in known
        ),
    ]


def _event(task: str | None, **data: Json) -> dict[str, str]:
    found = {"type": "task", "data": json_text({key: value for key, value in data.items() if value is not None})}
    return found if task is None else {**found, "task": task}


def _row(task: TaskRecord) -> dict[str, Any]:
    return {**msgspec.structs.asdict(task), "status": str(task.status)}


def _to_task(row: Row) -> TaskRecord:
    return TaskRecord(
        n=row["n"],
        name=row["name"],
        status=TaskStatus(row["status"]),
        cached=bool(row["cached"]),
        parent=row["parent"],
        snapshot=row["snapshot"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        exit_code=row["exit_code"],
    )
