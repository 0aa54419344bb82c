"""How a pipeline differs from a plain command: it runs task by task. For a task without a snapshot: take the build
lock, restore the workspace, command the supervisor to run the task, then take a snapshot.

If this worker dies, its adopter reads the progress from the supervisor's events (`pipeline_progress.py`) and continues
from there: every step may be repeated. Files are copied or replaced only while the supervisor waits between tasks.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from holdfast.duties.evictor import Evictor
from holdfast.errors import CacheFull, Invalid, SnapshotDamaged, SnapshotFailed
from holdfast.model import Cause, Error, TaskStatus
from holdfast.pipeline.connectors import WorkspaceNotConsistent, connector_of
from holdfast.pipeline.connectors.postgres import own_line
from holdfast.pipeline.plan import PipelinePlan, TaskPlan
from holdfast.pipeline.snapshots import SNAPSHOTS, SnapshotFolders, WorkspaceChanged
from holdfast.pipeline_spec import NO_UPLOADS
from holdfast.runner.base import AttemptEnd, AttemptHandle, CannotStart, NoSpace, Runner
from holdfast.runner.collected_outputs import ArtifactLimits, ContractViolation
from holdfast.runner.disk import SHARED
from holdfast.runner.secrets import NO_MASK
from holdfast.runner.start_pause import needs_space
from holdfast.runner.wire import Command, truncated
from holdfast.runner.workspace import TREE
from holdfast.runner_specs import check_spec
from holdfast.timing import backoff, jitter
from holdfast.worker.attempt_changes import AttemptChanges
from holdfast.worker.collect import CollectOutputs
from holdfast.worker.execution_services import ExecutionServices
from holdfast.worker.held_leases import HeldLease, require_trust
from holdfast.worker.pipeline_progress import PipelineProgress
from holdfast.worker.pipeline_workspace import PipelineWorkspace
from holdfast.worker.planning import StagedPipeline, facts_for, plan_for, plan_in, sources_for
from holdfast.worker.supervisor_link import POLL_SECONDS, SupervisorLink, until
from holdfast.worker.task_outputs import OutputsToStore, TaskOutputs, in_threads
from holdfast.worker.task_store import TaskStore

log = logging.getLogger(__name__)

SNAPSHOT_CHANGED = "snapshot %s has changed since it was published; building it again"
"""A log line that torture runs look for."""

TASK_POLL_SECONDS = 0.1
"""Seconds between polls while a task runs."""
BUILD_POLL_SECONDS = 0.25
"""Seconds between polls for a snapshot that another job builds."""
NO_SPACE_BASE, NO_SPACE_CAP = 1.0, 30.0
"""Seconds before a workspace is restored again after the disk was full: the first time, and at most."""
TASK_ENDS = {"timed_out": TaskStatus.TIMED_OUT, "idle_timeout": TaskStatus.TIMED_OUT}


class PipelineExecution:
    """One attempt of a pipeline in this worker."""

    def __init__(
        self,
        services: ExecutionServices,
        runner: Runner,
        held: HeldLease,
        link: SupervisorLink,
        changes: AttemptChanges,
    ) -> None:
        self._services = services
        self._runner = runner
        self._held = held
        self._lease = held.lease
        self._link = link
        self._changes = changes
        self._folders = SnapshotFolders(services.settings.shared / SNAPSHOTS, at=self._at, check=services.shared.check)
        self._evictor = Evictor(
            services.store,
            self._folders,
            most=services.settings.snapshots_max_bytes,
            shortage=lambda: services.disks.shortage(SHARED),
        )
        self._locked: str | None = None
        self.mask = NO_MASK
        self.task_names: Sequence[str] = ()
        self._progress = PipelineProgress((), at=0)

    # Before the start

    async def prepare(self) -> AttemptEnd | None:
        """Plan from the current files, and wait for the build lock of the first snapshot that is missing.

        Return an AttemptEnd if the pipeline needs no start: every task is cached, or it cannot be planned.
        """
        try:
            await self._plan_now()
            if await self._secure(0) == len(self._plan.tasks):
                return AttemptEnd(cause=Cause.EXIT, exit_code=0)
        except Invalid as error:
            return AttemptEnd(cause=Cause.START_FAILED, error=Error(code="contract_violation", message=str(error)))
        except CannotStart as error:
            return AttemptEnd(cause=Cause.START_FAILED, error=error.error)
        except SnapshotFailed as error:
            return AttemptEnd(cause=Cause.START_FAILED, error=Error(code=error.code, message=str(error)))
        return None

    async def _plan_now(self) -> None:
        """Plan, and record the plan; tasks that existing snapshots cover are recorded as done."""
        check_spec(self._lease.runner, self._lease.spec)
        if self._lease.policy.uploads:
            raise Invalid("uploads", NO_UPLOADS)
        connector = connector_of(self._lease.spec.get("connector", "files"))
        facts = await facts_for(self._lease, self._runner, connector)
        self._follow(await asyncio.to_thread(lambda: plan_for(self._lease, self._services.settings, facts)))
        self._at("planned")
        if self._plan.base is not None and not await self._task_store.known([self._plan.base]):
            raise Invalid("base", f"there is no snapshot {self._plan.base}")
        await self._task_store.plan(await self._done())
        self._at("recorded")

    def staging(self) -> StagedPipeline:
        return StagedPipeline(self._plan, sources_for(self._lease, self._services.settings))

    async def adopt(self, running: AttemptHandle) -> None:
        """Continue with the plan that the attempt was started with, unless its workspace was removed."""
        try:
            self._follow(await asyncio.to_thread(lambda: plan_in(running.workspace)))
        except FileNotFoundError:
            log.warning(
                "job %s attempt %d: its workspace is gone; only its work folder can be collected",
                self._lease.id,
                self._lease.attempt,
            )

    def _follow(self, found: PipelinePlan) -> None:
        self._plan = found
        self._task_store = TaskStore(self._services.store, self._lease, found)
        self.task_names = [task.name for task in found.tasks]
        self._progress = PipelineProgress(self.task_names, at=0 if found.base is None else -1)
        self._outputs = TaskOutputs(self._folders, self._task_store, found, self._progress)
        self._workspace = PipelineWorkspace(
            self._services,
            self._lease,
            self._link,
            folders=self._folders,
            plan=found,
            progress=self._progress,
            task_store=self._task_store,
            outputs=self._outputs,
        )

    def own_line(self, name: str | None, line: bytes) -> bytes:
        """Rewrite a line of a task's stderr to name the developer's SQL file instead of our staged copy."""
        if name is None or not line.startswith(b"psql:"):
            return line
        task = self._plan.tasks[self.task_names.index(name)]
        return line if task.sql is None else own_line(task, line)

    # While it runs

    def pace(self, quiet: int) -> float:
        return POLL_SECONDS if self._progress.running is None else TASK_POLL_SECONDS

    def on_event(self, event: Mapping[str, Any]) -> None:
        self._progress.on_event(event)

    @property
    def failed_task(self) -> str | None:
        return self._progress.failed

    async def drive(self, running: AttemptHandle) -> None:
        """Decide at every task boundary what comes next. Runs until the caller cancels it at the end of the attempt."""
        full = 0
        while True:
            await until(lambda: self._progress.waiting_before is not None)
            assert self._progress.waiting_before is not None
            try:
                await self._continue(running, self._progress.waiting_before)
                full = 0
            except NoSpace as error:  # No task runs, and a stop request reaches the supervisor meanwhile.
                full += 1
                log.warning("job %s attempt %d waits for disk space: %s", self._lease.id, self._lease.attempt, error)
                self._runner.pause(f"the disk was full: {error}")
                await asyncio.sleep(jitter(backoff(full, base=NO_SPACE_BASE, cap=NO_SPACE_CAP)))
            except (CacheFull, SnapshotDamaged, SnapshotFailed) as error:
                await self._give_up(running, error.code, str(error))
            except (WorkspaceNotConsistent, WorkspaceChanged) as error:
                await self._give_up(running, "not_quiet", str(error))
            except CannotStart as error:
                await self._give_up(running, error.error.code, error.error.message)
            except Invalid as error:
                await self._give_up(running, "contract_violation", str(error))
            except OSError as error:
                await self._give_up(running, SnapshotFailed.code, str(error))

    def cached_outputs(self) -> CollectOutputs:
        return self._outputs.collect_cached

    def collector(self, running: AttemptHandle, end: AttemptEnd) -> CollectOutputs:
        """Return how to collect the outputs of an ended attempt: only the work folder if its plan is gone."""
        return self._outputs.collector(running, end) if self.task_names else running.outputs

    async def _continue(self, running: AttemptHandle, done_tasks: int) -> None:
        """Keep the result of the last task, and start the next one that has to run; `done_tasks` tasks are done.

        The workspace may be ahead of the supervisor: a previous owner may have restored a snapshot into it. That stays
        valid, even if the snapshot is gone by now.
        """
        await self._keep(running, done_tasks)
        done = max(done_tasks, self._progress.at)
        following = await self._secure(done)
        if self._changes.interrupted:
            await until(lambda: self._progress.waiting_before != done_tasks)
        elif following == len(self._plan.tasks):
            with needs_space("cannot copy the outputs of cached tasks"):
                known = self._progress.at >= following or await self._outputs.inherit_last(running, self._lease.token)
            if not known:
                await self._plan_again(done)
                return
            self._at("ending")
            end = Command(token=self._lease.token, verb="end")
            await self._link.send_until(running, end, lambda: False)
        else:
            if not await self._workspace.restore(running, following):
                await self._plan_again(done)
                return
            await self._workspace.start_service(running)
            await self._task_store.write(following, TaskStatus.RUNNING)
            self._at("going")
            go = Command(token=self._lease.token, verb="go", task=following)
            await self._link.send_until(running, go, lambda: self._progress.waiting_before != done_tasks)

    async def _plan_again(self, done: int) -> None:
        """Record that only `done` tasks are done: the snapshot that was to be restored is gone."""
        await self._task_store.plan(done)
        await asyncio.sleep(jitter(BUILD_POLL_SECONDS))

    async def settle(self) -> None:
        """Record how each task ended, after the end of the attempt. A task cut off by a loss becomes pending again."""
        for n, end in self._progress.ends.items():
            if end.well:
                status = TaskStatus.SUCCEEDED
            elif end.cause in ("cancelled", "interrupted"):
                status = TaskStatus.CANCELLED
            else:
                status = TASK_ENDS.get(end.cause, TaskStatus.FAILED)
            await self._task_store.close(n, status, end)
        if self._progress.running is not None:
            await self._task_store.write(self._progress.running, TaskStatus.PENDING)

    # Which snapshots exist, and who builds those that are missing

    async def _secure(self, n: int) -> int:
        """Return the first task from the nth on that has to run, with the build lock of its snapshot taken.

        Return the number of tasks if none has to run. The snapshot is looked up again under the lock, because another
        job may have built it in the meantime.
        """
        while n < len(self._plan.tasks) and not self._changes.interrupted:
            known = await self._done(beyond=n)
            if known > n:
                await self._task_store.reuse(range(n, known))
                self._at("reused")
                n = known
                continue
            target = next((task.snapshot for task in self._plan.tasks[n:] if task.keep), None)
            if target is None or target == self._locked:
                break
            await self._lock(target)
        return n

    async def _done(self, beyond: int = 0) -> int:
        """Return how many tasks the latest existing snapshot covers. One that would be reused is verified first."""
        while (done := await self._task_store.done()) > beyond:
            row = await self._task_store.use(self._plan.tasks[done - 1].snapshot)
            if row is None:
                continue
            if await self._outputs.whole(row) and await asyncio.to_thread(self._folders.verify, row.folder, row.digest):
                break
            log.error(SNAPSHOT_CHANGED, row.id)
            await self._task_store.drop(row)
        return done

    async def _lock(self, snapshot: str) -> None:
        """Try to take the build lock of a snapshot; if another job has it, wait a moment."""
        if self._locked is not None:
            await self._task_store.unlock(self._locked)
            self._locked = None
        if await self._task_store.lock(snapshot):
            self._locked = snapshot
            self._at("locked")
        else:
            await asyncio.sleep(jitter(BUILD_POLL_SECONDS))

    async def _keep(self, running: AttemptHandle, done_tasks: int) -> None:
        """Record that a task is done. Store its result first if that is wanted and no snapshot exists yet."""
        if done_tasks == 0 or self._progress.at != done_tasks or done_tasks - 1 not in self._progress.ends:
            return
        task = self._plan.tasks[done_tasks - 1]
        while task.keep and not self._changes.interrupted and not await self._task_store.known([task.snapshot]):
            if self._locked != task.snapshot:
                await self._lock(task.snapshot)
            elif not await self._store(running, task):
                break
        if not self._changes.interrupted:
            await self._task_store.close(task.n, TaskStatus.SUCCEEDED, self._progress.ends[task.n])
            self._at("kept")

    async def _store(self, running: AttemptHandle, task: TaskPlan) -> bool:
        """Snapshot the workspace and all outputs up to a task. Return False if the outputs must not be reused.

        A reported failure, or outputs that break the contract, are judged at the end of the job, as without snapshots:
        a later task may still replace them.
        """
        limits = ArtifactLimits(bytes=self._services.settings.artifact_max_bytes)
        async with in_threads(self._folders.temporary(f"outputs.{secrets.token_hex(8)}")) as folder:
            try:
                collect = partial(self._outputs.collect_into, folder, running, limits, self.mask)
                to_store = await self._evictor.with_room(collect)
            except (ContractViolation, Invalid) as error:
                log.warning(
                    "job %s: no snapshot of task %s, continuing without it: %s", self._lease.id, task.name, error
                )
                await self._task_store.unlock(task.snapshot)
                self._locked = None
                return False
            self._at("outputs")
            await self._publish(running, task, to_store)
        return True

    async def _publish(self, running: AttemptHandle, task: TaskPlan, to_store: OutputsToStore) -> None:
        await self._workspace.stop_service(running)
        tree = running.workspace / TREE
        await asyncio.to_thread(lambda: connector_of(self._plan.connector).check_quiet(tree))
        self._at("quiet")
        outputs = to_store.outputs
        made = await self._evictor.copy(task.snapshot, tree, to_store.folder, more=outputs.size)
        self._at("copied")
        await require_trust(self._held)
        if self._changes.interrupted:
            await asyncio.to_thread(lambda: self._folders.remove(made.folder))
            return
        if not await self._task_store.publish(task, made, outputs):
            await asyncio.to_thread(lambda: self._folders.remove(made.folder))
        self._locked = None
        self._at("published")

    async def _give_up(self, running: AttemptHandle, code: str, message: str) -> None:
        log.warning("job %s attempt %d cannot continue, ending it: %s", self._lease.id, self._lease.attempt, message)
        text = truncated(f"{code}: {message}")
        end = Command(token=self._lease.token, verb="end", text=text)
        await self._link.send_until(running, end, lambda: False)

    def _at(self, step: str) -> None:
        self._services.at(step, self._lease)
