"""Tasks, snapshots and build locks of a pipeline in the database, read and written for one lease.

Every write is fenced and raises `Lost` if the lease is lost. While the database is unavailable, operations are retried.
"""

from collections.abc import Iterable, Sequence

from holdfast.errors import Invalid, NotFound, SnapshotDamaged
from holdfast.model import Lease, Outputs, Snapshot, TaskStatus
from holdfast.pipeline.plan import PipelinePlan, TaskPlan
from holdfast.pipeline.snapshots import CopiedFolder
from holdfast.store import Store
from holdfast.store.snapshots import NewSnapshot
from holdfast.store.tasks import PlannedTask
from holdfast.worker.batch_writer import with_retries
from holdfast.worker.held_leases import LeaseLost, boottime
from holdfast.worker.pipeline_progress import TaskEnd


class TaskStore:
    def __init__(self, store: Store, lease: Lease, plan: PipelinePlan) -> None:
        self._store = store
        self._lease = lease
        self._plan = plan

    # Tasks

    async def plan(self, done: int) -> None:
        """Record the plan, replacing an earlier one, with the first `done` tasks as done."""
        tasks = [PlannedTask(name=task.name, parent=task.parent, snapshot=task.snapshot) for task in self._plan.tasks]
        if not await with_retries(lambda: self._store.tasks.replan(self._lease, tasks, done=done), "recording a plan"):
            raise LeaseLost

    async def write(self, n: int, status: TaskStatus, *, cached: bool = False) -> None:
        write = self._store.tasks.write
        if not await with_retries(lambda: write(self._lease, n, status, cached=cached), "recording a task"):
            raise LeaseLost

    async def close(self, n: int, status: TaskStatus, end: TaskEnd) -> None:
        """Record how a task ended. The time is sent as its age, recomputed at every retry."""
        write, code = self._store.tasks.write, end.exit_code
        written = await with_retries(
            lambda: write(self._lease, n, status, exit_code=code, ago=end.ago(boottime())), "recording a task"
        )
        if not written:
            raise LeaseLost

    async def reuse(self, tasks: Iterable[int]) -> None:
        """Record these tasks as succeeded from the cache."""
        for n in tasks:
            await self.write(n, TaskStatus.SUCCEEDED, cached=True)

    # Snapshots

    async def done(self) -> int:
        """Return how many tasks the latest existing snapshot covers."""
        return self._plan.latest(await self.known(task.snapshot for task in self._plan.tasks))

    async def known(self, snapshots: Iterable[str]) -> frozenset[str]:
        """Return which of these snapshots exist."""
        ids: Sequence[str] = list(snapshots)
        tenant = self._lease.tenant
        found = await with_retries(lambda: self._store.snapshots.existing(ids, tenant=tenant), "looking up snapshots")
        return frozenset(found)

    async def use(self, snapshot: str) -> Snapshot | None:
        """Return a snapshot that is about to be used and mark it as used; None if it is gone."""
        tenant = self._lease.tenant
        found = await with_retries(
            lambda: self._store.snapshots.use([snapshot], tenant=tenant), "looking up a snapshot"
        )
        return found.get(snapshot)

    async def outputs(self, snapshot: Snapshot) -> Outputs | None:
        """Return the outputs stored with a snapshot; None if an older version made it.

        Raise SnapshotDamaged if the snapshot is gone.
        """
        try:
            return await with_retries(lambda: self._store.snapshots.outputs(snapshot), "looking up a snapshot")
        except NotFound as error:
            raise SnapshotDamaged(f"snapshot {snapshot.id} is gone") from error

    async def drop(self, snapshot: Snapshot) -> None:
        """Remove the row of a snapshot whose folder is damaged, so that it is built again."""
        await with_retries(lambda: self._store.snapshots.drop(snapshot), "removing a snapshot")

    async def lock(self, snapshot: str) -> bool:
        """Try to take the build lock of a snapshot. False: another job has it, or the snapshot exists."""
        lock = await with_retries(lambda: self._store.snapshots.take(self._lease, snapshot), "taking a build lock")
        if lock.answer == "lost":
            raise LeaseLost
        return lock.answer == "yours"

    async def unlock(self, snapshot: str) -> None:
        await with_retries(lambda: self._store.snapshots.release(self._lease, snapshot), "releasing a build lock")

    async def publish(self, task: TaskPlan, made: CopiedFolder, outputs: Outputs) -> bool:
        """Publish a folder as the snapshot of a task. Return False if another folder is published already.

        A retry after a lost reply finds its own folder and returns True.
        """
        new = NewSnapshot(
            id=task.snapshot,
            parent=task.parent,
            task=task.name,
            task_hash=task.hash,
            components=task.components,
            folder=made.folder,
            digest=made.digest,
            size=made.size + outputs.size,
            outputs=outputs,
        )
        answer = await with_retries(lambda: self._store.snapshots.publish(self._lease, new), "publishing a snapshot")
        if answer == "published":
            return True
        if answer == "refused":
            raise Invalid("tasks", f"snapshot {task.snapshot} is not in the recorded plan of this job")
        existing = await self.use(task.snapshot)
        if existing is None:
            raise LeaseLost
        return existing.folder == made.folder
