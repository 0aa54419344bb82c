"""The tasks of a pipeline job: planned together, then updated one by one, only by the worker that leases the job.

Rows exist once a worker has planned them; until then the tasks of a waiting pipeline are derived from its spec.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import NotFound
from holdfast.model import Job, Json, Lease, TaskRecord, TaskStatus
from holdfast.pipeline_spec import pipeline_of
from holdfast.store.database import Database, Row, Tx, json_text
from holdfast.store.rows import known_id


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task in a plan."""

    name: str
    parent: str
    snapshot: str


class Tasks:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self, job_id: str, *, tenant: str = "default") -> Sequence[TaskRecord]:
        """Return the tasks of a job, in order; none if the job is not a pipeline."""
        found = await self._database.read("get_job", id=known_id(job_id), tenant=tenant)
        if not found:
            raise NotFound("job", job_id)
        return await self._of(found[0]["id"], msgspec.json.decode(found[0]["spec"]))

    async def of(self, job: Job) -> Sequence[TaskRecord]:
        """Like `list`, for a job that the caller has already read."""
        return await self._of(job.id, job.spec)

    async def of_all(self, jobs: Sequence[Job]) -> Mapping[str, Sequence[TaskRecord]]:
        """Return the tasks of jobs that the caller has already read, by job id, in at most one statement."""
        pipelines = [job for job in jobs if "tasks" in job.spec]
        if not pipelines:
            return {}
        records: dict[str, list[TaskRecord]] = {}
        for row in await self._database.read("tasks_of_jobs", ids=[job.id for job in pipelines]):
            records.setdefault(row["job_id"], []).append(_to_task(row))
        return {job.id: records.get(job.id) or _waiting(job.spec) for job in pipelines}

    async def _of(self, job_id: str, spec: Mapping[str, Any]) -> Sequence[TaskRecord]:
        if "tasks" not in spec:
            return []
        rows = await self._database.read("list_tasks", id=job_id)
        return [_to_task(row) for row in rows] or _waiting(spec)

    async def replan(self, lease: Lease, tasks: Sequence[PlannedTask], *, done: int) -> bool:
        """Replace the plan in one transaction; return False if the lease is lost.

        The first `done` tasks are in the workspace: those that this job ran keep their record, the others are cached.
        All later tasks are pending, even those that had succeeded in a workspace that is lost. The snapshots in the
        plan count as used from now on, so they are not evicted.
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
            await tx.rows("add_events", id=lease.id, events=_task_events(before, wanted))
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
        """Record the status of a task, with the event that reports it; return False if the lease is lost. Idempotent.

        `ago` is the number of seconds since the task ended: a duration, so that the worker's clock need not be right.
        """

        async def change(tx: Tx) -> bool:
            if not await tx.rows("lock_lease", id=lease.id, token=lease.token):
                return False
            fields = {"status": status, "cached": cached, "exit_code": exit_code, "ago": ago}
            for row in await tx.rows("write_task", id=lease.id, n=n, **fields):
                event = _event(row["name"], status=status, cached=cached or None, exit_code=exit_code)
                await tx.rows("add_events", id=lease.id, events=[event])
            return True

        return await self._database.transact(change)


def _waiting(spec: Mapping[str, Any]) -> list[TaskRecord]:
    """Return the unplanned tasks of a spec. A spec submitted by SQL may be invalid; its worker will report that."""
    try:
        pipeline = pipeline_of(spec)
    except msgspec.ValidationError:
        return []
    return [TaskRecord(n=n, name=task.name) for n, task in enumerate(pipeline.tasks)] if pipeline else []


def _merged(before: Sequence[TaskRecord], tasks: Sequence[PlannedTask], done: int) -> list[TaskRecord]:
    """Return the new plan, with the records of tasks that this job ran and that are still valid."""
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


def _task_events(before: Sequence[TaskRecord], wanted: Sequence[TaskRecord]) -> list[dict[str, str]]:
    """Return the events of a new plan: the plan, then each task that need not run."""
    plan = _event(None, plan=wanted[-1].snapshot, tasks=[task.name for task in wanted], replanned=bool(before) or None)
    was_cached = {(task.name, task.snapshot) for task in before if task.cached}
    return [
        plan,
        *(
            _event(task.name, status=task.status, cached=True, snapshot=task.snapshot)
            for task in wanted
            if task.cached and (task.name, task.snapshot) not in was_cached
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
