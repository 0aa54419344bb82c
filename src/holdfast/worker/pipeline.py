"""Drives a pipeline. For each task: is its result known? If not: the build lock, the workspace, the word to go; then
its snapshot.

Whatever happens to this worker, the next one reads from the supervisor's events where things stand (`course.py`) and
goes on there: every step may be done again. Nothing is copied or replaced but while the supervisor holds.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.duties.evictor import Evictor
from holdfast.errors import CacheFull, Invalid, SnapshotDamaged, SnapshotFailed
from holdfast.model import Cause, Error, Snapshot, TaskStatus
from holdfast.pipeline.connectors import CONNECTORS, NotQuiet
from holdfast.pipeline.plan import Plan, TaskPlan
from holdfast.pipeline.snapshots import SNAPSHOTS, Changed, Folders
from holdfast.runner.base import CannotStart, End, EngineUnreachable, Runner, Running
from holdfast.runner.outputs import remove_tree
from holdfast.runner.space import TREE, give_like, replaced_by
from holdfast.runner.spec import Command, fitting
from holdfast.submission import check_spec
from holdfast.tasks import NO_UPLOADS
from holdfast.timing import jitter
from holdfast.worker.course import Course, tree_name
from holdfast.worker.desk import Desk
from holdfast.worker.lease import Hold, Lost, until_trusted
from holdfast.worker.ledger import Ledger
from holdfast.worker.staging import Staged, facts_for, plan_for, plan_in, sources_for

log = logging.getLogger(__name__)

LOOK = 0.02
"""Seconds between looks at what a supervisor is about to say, or a server about to be."""
PACE = 0.1
"""Seconds between looks while a task runs."""
WAIT = 0.25
"""Seconds between looks at a snapshot that somebody else builds."""
SAY_AGAIN = 5.0
TASK_ENDS = {"timed_out": TaskStatus.TIMED_OUT, "idle_timeout": TaskStatus.TIMED_OUT}


class Pipeline:
    """One attempt of a pipeline in this worker's hands. `interrupted` says that it is stopped, lost or handed over."""

    def __init__(self, desk: Desk, runner: Runner, hold: Hold, interrupted: Callable[[], bool]) -> None:
        self._desk = desk
        self._runner = runner
        self._hold = hold
        self._lease = hold.lease
        self._interrupted = interrupted
        self._folders = Folders(desk.settings.shared / SNAPSHOTS, at=self._at, check=desk.shared.check)
        self._evictor = Evictor(desk.store, self._folders, most=desk.settings.snapshots_max_bytes)
        self._locked: str | None = None
        self.names: Sequence[str] = ()
        self.course = Course((), at=0)

    # Before the start

    async def begin(self) -> End | None:
        """Plan by the files as they are, and wait until what is to be built first is ours to build.

        The answer is the end of a pipeline that needs no start: all of it is known, or none of it can be planned.
        """
        try:
            await self._plan_now()
            if await self._secure(0) == len(self._plan.tasks):
                return End(cause=Cause.EXIT, exit_code=0)
        except Invalid as error:
            return End(cause=Cause.START_FAILED, error=Error(code="contract_violation", message=str(error)))
        except CannotStart as error:
            return End(cause=Cause.START_FAILED, error=error.error)
        except SnapshotFailed as error:
            return End(cause=Cause.START_FAILED, error=Error(code=error.code, message=str(error)))
        return None

    async def _plan_now(self) -> None:
        """Plan, and put the plan into the record, with what is done by snapshots that are there."""
        check_spec(self._lease.runner, self._lease.spec)
        if self._lease.policy.uploads:
            raise Invalid("uploads", NO_UPLOADS)
        connector = CONNECTORS[self._lease.spec.get("connector", "files")]
        facts = await facts_for(self._lease, self._runner, connector)
        self._follow(await asyncio.to_thread(lambda: plan_for(self._lease, self._desk.settings, facts)))
        self._at("planned")
        if self._plan.base is not None and not await self._ledger.known([self._plan.base]):
            raise Invalid("base", f"there is no snapshot {self._plan.base}")
        await self._ledger.plan(await self._done())
        self._at("recorded")

    def staged(self) -> Staged:
        return Staged(self._plan, sources_for(self._lease, self._desk.settings))

    async def adopt(self, running: Running) -> None:
        """Go on with the plan that it was started with. Where that was cleared away, there is nothing to go on with."""
        try:
            self._follow(await asyncio.to_thread(lambda: plan_in(running.space)))
        except FileNotFoundError:
            log.warning("job %s attempt %d: its workspace is gone", self._lease.id, self._lease.attempt)

    def _follow(self, found: Plan) -> None:
        self._plan = found
        self._connector = CONNECTORS[found.connector]
        self._ledger = Ledger(self._desk.store, self._lease, found)
        self.names = [task.name for task in found.tasks]
        self.course = Course(self.names, at=0 if found.base is None else -1)

    # While it runs

    @property
    def pace(self) -> float:
        return LOOK if self.course.running is None else PACE

    async def drive(self, running: Running) -> None:
        """Decide at every hold what comes next. Ends with whoever waits for the supervisor."""
        while True:
            await self._until(lambda: self.course.holding is not None)
            assert self.course.holding is not None
            try:
                await self._go_on(running, self.course.holding)
            except (CacheFull, SnapshotDamaged, SnapshotFailed) as error:
                await self._give_up(running, error.code, str(error))
            except (NotQuiet, Changed) as error:
                await self._give_up(running, "not_quiet", str(error))
            except CannotStart as error:
                await self._give_up(running, error.error.code, error.error.message)
            except Invalid as error:
                await self._give_up(running, "contract_violation", str(error))
            except OSError as error:
                await self._give_up(running, SnapshotFailed.code, str(error))

    async def _go_on(self, running: Running, behind: int) -> None:
        """With so many tasks behind us: keep the last one's result, and begin the next that has to run.

        The workspace may be further than the supervisor: whoever had it before us placed what was known. That stands,
        whatever became of the snapshot meanwhile.
        """
        await self._keep(running, behind)
        done = max(behind, self.course.at)
        following = await self._secure(done)
        if self._interrupted():
            await self._until(lambda: self.course.holding != behind)
        elif following == len(self._plan.tasks):
            self._at("ending")
            await self._say(running, Command(token=self._lease.token, verb="end"), lambda: False)
        else:
            if not await self._restore(running, following):
                await self._ledger.plan(done)
                await asyncio.sleep(jitter(WAIT))
                return
            await self._serve(running)
            await self._ledger.write(following, TaskStatus.RUNNING)
            self._at("going")
            go = Command(token=self._lease.token, verb="go", task=following)
            await self._say(running, go, lambda: self.course.holding != behind)

    async def settle(self) -> None:
        """Write how each task ended, once the attempt has; what was cut off by a loss stands where it began."""
        for n, end in self.course.ends.items():
            if end.well:
                status = TaskStatus.SUCCEEDED
            elif end.cause in ("cancelled", "interrupted"):
                status = TaskStatus.CANCELLED
            else:
                status = TASK_ENDS.get(end.cause, TaskStatus.FAILED)
            await self._ledger.close(n, status, end)
        if self.course.running is not None:
            await self._ledger.write(self.course.running, TaskStatus.PENDING)

    # What is known, and who builds what is not

    async def _secure(self, n: int) -> int:
        """Return the first task from the nth on that has to run; what it leads to is then ours to build.

        Behind the last if all is known. Looked at again under the lock: somebody may have built it before us.
        """
        while n < len(self._plan.tasks) and not self._interrupted():
            known = await self._done(beyond=n)
            if known > n:
                await self._ledger.reuse(range(n, known))
                self._at("reused")
                n = known
                continue
            target = next((task.snapshot for task in self._plan.tasks[n:] if task.keep), None)
            if target is None or target == self._locked:
                break
            await self._lock(target)
        return n

    async def _done(self, beyond: int = 0) -> int:
        """How many tasks are done by the latest snapshot that is there; what is to be reused must also be whole."""
        while (done := await self._ledger.done()) > beyond:
            row = await self._ledger.use(self._plan.tasks[done - 1].snapshot)
            if row is None:
                continue
            if await asyncio.to_thread(self._folders.verify, row.folder, row.digest):
                break
            log.error("snapshot %s is not what was published; it is built again", row.id)
            await self._ledger.drop(row)
        return done

    async def _lock(self, snapshot: str) -> None:
        """Try to become the one who builds a snapshot, or wait a moment."""
        if self._locked is not None:
            await self._ledger.unlock(self._locked)
            self._locked = None
        if await self._ledger.lock(snapshot):
            self._locked = snapshot
            self._at("locked")
        else:
            await asyncio.sleep(jitter(WAIT))

    async def _keep(self, running: Running, behind: int) -> None:
        """Note that a task is done; store what it made, if that is wanted and nobody has."""
        if behind == 0 or self.course.at != behind or behind - 1 not in self.course.ends:
            return
        task = self._plan.tasks[behind - 1]
        while task.keep and not self._interrupted() and not await self._ledger.known([task.snapshot]):
            if self._locked == task.snapshot:
                await self._publish(running, task)
            else:
                await self._lock(task.snapshot)
        if not self._interrupted():
            await self._ledger.close(task.n, TaskStatus.SUCCEEDED, self.course.ends[task.n])
            self._at("kept")

    async def _publish(self, running: Running, task: TaskPlan) -> None:
        await self._quiet(running)
        tree = running.space / TREE
        await asyncio.to_thread(lambda: self._connector.check_quiet(tree))
        self._at("quiet")
        made = await self._evictor.copy(task.snapshot, tree)
        self._at("copied")
        await self._trusted()
        if self._interrupted():
            await asyncio.to_thread(lambda: self._folders.remove(made.folder))
            return
        if not await self._ledger.publish(task, made):
            await asyncio.to_thread(lambda: self._folders.remove(made.folder))
        self._locked = None
        self._at("published")

    # The workspace and the service, while the supervisor holds

    async def _restore(self, running: Running, behind: int) -> bool:
        """See to it that the workspace has so many tasks behind it; False: what should bring it there is gone."""
        if self.course.at == behind:
            return True
        await self._quiet(running)
        snapshot = self._plan.tasks[behind - 1].snapshot if behind else self._plan.base
        assert snapshot is not None  # Without a base, what there is at first has no task behind it.
        if (row := await self._ledger.use(snapshot)) is None:
            if not behind:
                raise SnapshotDamaged(f"the base, snapshot {snapshot}, is gone")
            return False
        name = tree_name(behind, self._lease.token)
        target = running.space / name
        try:
            await asyncio.to_thread(lambda: self._fill(target, row))
        except SnapshotDamaged:
            await self._ledger.drop(row)
            return False
        self._at("restored")
        place = Command(token=self._lease.token, verb="place", name=name)
        await self._say(running, place, lambda: self.course.at == behind)
        self._at("placed")
        await asyncio.to_thread(lambda: remove_tree(replaced_by(target)))
        return True

    def _fill(self, target: Path, row: Snapshot) -> None:
        """Restore beside the space, and move it in: what is in there is the tasks' own."""
        made = target.parent.parent / f".{target.name}"
        for leftover in (made, target, replaced_by(target)):
            remove_tree(leftover)
        self._folders.restore(row.folder, row.digest, made)
        give_like(made, target.parent / TREE)
        made.rename(target)

    async def _quiet(self, running: Running) -> None:
        if self.course.serving:
            stop = Command(token=self._lease.token, verb="service", kind="stop")
            await self._say(running, stop, lambda: not self.course.serving)

    async def _serve(self, running: Running) -> None:
        if not self._connector.serves:
            return
        if not self.course.serving:
            start = Command(token=self._lease.token, verb="service", kind="start")
            await self._say(running, start, lambda: self.course.serving)
        await self._until(lambda: self._connector.ready(running.space / TREE))
        self._at("serving")

    async def _give_up(self, running: Running, code: str, message: str) -> None:
        log.warning("job %s attempt %d cannot go on: %s", self._lease.id, self._lease.attempt, message)
        text = fitting(f"{code}: {message}")
        await self._say(running, Command(token=self._lease.token, verb="end", text=text), lambda: False)

    # Speaking with the supervisor

    async def _say(self, running: Running, command: Command, done: Callable[[], bool]) -> None:
        """Say something until it is done; what ends the attempt is never seen to be done here."""
        while not done():
            await self._trusted()
            try:
                await running.tell(command)
            except (EngineUnreachable, OSError) as error:  # A disk without room for a word may have some soon.
                log.warning(
                    "job %s attempt %d: cannot tell %s: %s", self._lease.id, self._lease.attempt, command.verb, error
                )
                await asyncio.sleep(WAIT)
                continue
            try:
                async with asyncio.timeout(SAY_AGAIN):
                    await self._until(done)
            except TimeoutError:
                pass

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():  # noqa: ASYNC110 - a server's file changes without an event
            await asyncio.sleep(LOOK)

    async def _trusted(self) -> None:
        if not await until_trusted(self._hold):
            raise Lost

    def _at(self, step: str) -> None:
        self._desk.at(step, self._lease)
