"""What the record says of a pipeline, read and written for one lease: its tasks, snapshots and build locks.

Every write is fenced; one that the lease no longer covers raises `Lost`. While the database is away, it is tried again.
"""

from collections.abc import Iterable, Sequence

from holdfast.errors import Invalid, NotFound, SnapshotDamaged
from holdfast.model import Lease, Outputs, Snapshot, TaskStatus
from holdfast.pipeline.plan import Plan, TaskPlan
from holdfast.pipeline.snapshots import Made
from holdfast.store import Store
from holdfast.store.snapshots import NewSnapshot
from holdfast.store.tasks import PlannedTask
from holdfast.worker.completer import retried
from holdfast.worker.course import TaskEnd
from holdfast.worker.lease import Lost, boottime


class Ledger:
    def __init__(self, store: Store, lease: Lease, plan: Plan) -> None:
        self._store = store
        self._lease = lease
        self._plan = plan

    # Tasks

    async def plan(self, done: int) -> None:
        """Put the plan into the record, in the place of the one that was there; so many tasks are done."""
        tasks = [PlannedTask(name=task.name, parent=task.parent, snapshot=task.snapshot) for task in self._plan.tasks]
        if not await retried(lambda: self._store.tasks.replan(self._lease, tasks, done=done), "a plan"):
            raise Lost

    async def write(self, n: int, status: TaskStatus, *, cached: bool = False) -> None:
        if not await retried(lambda: self._store.tasks.write(self._lease, n, status, cached=cached), "a task"):
            raise Lost

    async def close(self, n: int, status: TaskStatus, end: TaskEnd) -> None:
        """Say how a task ended. When that was is told by what has passed since, also while the database is away."""
        write, code = self._store.tasks.write, end.exit_code
        if not await retried(lambda: write(self._lease, n, status, exit_code=code, ago=end.ago(boottime())), "a task"):
            raise Lost

    async def reuse(self, tasks: Iterable[int]) -> None:
        """Note that the results of these tasks were there already."""
        for n in tasks:
            await self.write(n, TaskStatus.SUCCEEDED, cached=True)

    # Snapshots

    async def done(self) -> int:
        """How many tasks from the first are done by the latest snapshot that exists."""
        return self._plan.latest(await self.known(task.snapshot for task in self._plan.tasks))

    async def known(self, snapshots: Iterable[str]) -> frozenset[str]:
        """Which of these exist."""
        ids: Sequence[str] = list(snapshots)
        tenant = self._lease.tenant
        found = await retried(lambda: self._store.snapshots.existing(ids, tenant=tenant), "a look at snapshots")
        return frozenset(found)

    async def use(self, snapshot: str) -> Snapshot | None:
        """What is known of a snapshot that is about to be used; None if it is gone."""
        tenant = self._lease.tenant
        found = await retried(lambda: self._store.snapshots.use([snapshot], tenant=tenant), "a look at a snapshot")
        return found.get(snapshot)

    async def outputs(self, snapshot: Snapshot) -> Outputs | None:
        """Read what the tasks up to a snapshot left; None: an older version made it. SnapshotDamaged: it is gone."""
        try:
            return await retried(lambda: self._store.snapshots.outputs(snapshot), "a look at a snapshot")
        except NotFound as error:
            raise SnapshotDamaged(f"snapshot {snapshot.id} is gone") from error

    async def drop(self, snapshot: Snapshot) -> None:
        """Take out one whose folder is damaged: it is built again."""
        await retried(lambda: self._store.snapshots.drop(snapshot), "the removal of a snapshot")

    async def lock(self, snapshot: str) -> bool:
        """Ask to be the one who builds it; False: somebody else is, or was."""
        turn = await retried(lambda: self._store.snapshots.take(self._lease, snapshot), "a build lock")
        if turn.answer == "lost":
            raise Lost
        return turn.answer == "yours"

    async def unlock(self, snapshot: str) -> None:
        await retried(lambda: self._store.snapshots.release(self._lease, snapshot), "a build lock")

    async def publish(self, task: TaskPlan, made: Made, outputs: Outputs) -> bool:
        """Make a folder the snapshot of a task; False: another one is. After a lost answer, a retry finds its own."""
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
        answer = await retried(lambda: self._store.snapshots.publish(self._lease, new), "a snapshot")
        if answer == "published":
            return True
        if answer == "refused":
            raise Invalid("tasks", f"snapshot {task.snapshot} is not in the plan that the record has of this job")
        stands = await self.use(task.snapshot)
        if stands is None:
            raise Lost
        return stands.folder == made.folder
