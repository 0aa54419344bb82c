"""The worker: adopts, claims and runs jobs until it is drained.

One task group contains everything: the claim loop, the listeners (notifications, polls for stop requests), the batch
writers, upkeep, duties, and one task per job. The heartbeat has its own thread. A worker survives database outages;
when it drains, it hands over the attempts that can run without it.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from holdfast.config import Settings
from holdfast.duties.scheduler import DutyScheduler
from holdfast.errors import StoreError
from holdfast.model import FUNCTION, FUNCTION_DOMAIN, Claimable, Lease, new_worker_id
from holdfast.runner.artifacts import ArtifactStore
from holdfast.runner.base import Runner
from holdfast.runner.checks import ReadinessChecks
from holdfast.runner.disk import LOOK_SECONDS
from holdfast.runner.function import FunctionRegistry
from holdfast.runner.shared_folder import SharedFolder
from holdfast.runner.state_folder import WorkerLocks
from holdfast.store import Store, notify
from holdfast.store.notify import TopicSignal
from holdfast.store.outage import level_of, retry_while_starting
from holdfast.timing import backoff, jitter
from holdfast.worker.attempt_execution import AttemptExecution
from holdfast.worker.batch_writer import HandOverRequest
from holdfast.worker.capabilities import Capabilities
from holdfast.worker.execution_services import ExecutionServices, StepHook
from holdfast.worker.functions import FunctionExecutor
from holdfast.worker.heartbeat import Heartbeat, HeartbeatResult, HeartbeatStore
from holdfast.worker.held_leases import HeldLease, HeldLeases, boottime
from holdfast.worker.queue_slots import QueueSlots
from holdfast.worker.upkeep import Upkeep

log = logging.getLogger(__name__)

CRASHED_DELAY = 5.0
PROMOTE = 1000
CLAIM = 500
"""Maximum jobs per claim: while these run, the database selects the next ones."""
DRAIN_SECONDS = 10.0
"""Time limit for the last writes of a draining worker; after that its leases have to expire."""


class Worker:
    """Runs jobs of its queues. `queues` maps each queue to its number of slots."""

    def __init__(
        self,
        store: Store,
        *,
        installation: str,
        shared: SharedFolder,
        artifacts: ArtifactStore,
        settings: Settings,
        queues: Mapping[str, int],
        runners: Sequence[Runner],
        checks: ReadinessChecks,
        functions: FunctionRegistry,
        locks: WorkerLocks,
        connect_beats: Callable[[], Awaitable[tuple[HeartbeatStore, Callable[[], Awaitable[None]]]]],
        worker_id: str | None = None,
        at: StepHook | None = None,
    ) -> None:
        self.id = worker_id or new_worker_id()
        self._store = store
        self._settings = settings
        self._slots = QueueSlots(queues)
        self._functions = functions
        self._locks = locks
        self._connect_beats = connect_beats
        self._held_leases = HeldLeases(settings.lease_ttl)
        self._services = ExecutionServices(store, self.id, settings, installation, shared, checks, artifacts, at)
        threads = sum(queues.values()) or settings.max_concurrency
        self._function_executor = FunctionExecutor(self._services, functions, threads=threads, done=self._release)
        self.capabilities = Capabilities(runners, functions, self._services.disks)
        self._adopt_at = 0.0
        """When to look for orphans again, unless a notification or a poll comes first."""
        self._to_launch: list[HeldLease] = []
        self._wake_up = asyncio.Event()
        self._settled = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self.started = asyncio.Event()
        self._signals = 0
        self.stuck = False
        """Whether a function did not end: its thread would keep the process from exiting."""

    def signalled(self) -> None:
        """Handle a signal: the first one drains, a second one exits immediately."""
        self._signals += 1
        if self._signals > 1:
            log.warning("second signal: exiting immediately; %d leases will expire", len(self._held_leases))
            os._exit(1)
        self.drain()

    def drain(self) -> None:
        """Drain: stop claiming, hand over and exit."""
        self._services.draining.set()
        self._wake_up.set()
        for held in self._held_leases.all():
            if held.on_change is not None and held.lease.runner != FUNCTION:
                held.on_change()

    async def run(self, *, once: bool = False) -> None:
        """Work until drained; with `once`, until nothing is left to claim."""
        with self._locks.acquire(self.id) as lock:
            await retry_while_starting(self._register)
            await retry_while_starting(self._register_functions)
            heartbeat = Heartbeat(
                self.id,
                self._held_leases,
                interval=self._settings.heartbeat_interval,
                connect=self._connect_beats,
                on_result=self._on_heartbeat,
            )
            await self._services.disks.look()
            duties = DutyScheduler(self._store, self.id, self._settings, self._services.artifacts)
            upkeep = self._upkeep()
            async with heartbeat, self._store.notifications.listening() as signal, self._all_tasks() as group:
                helpers = [
                    group.create_task(loop)
                    for loop in (
                        *(writer.run() for writer in self._services.writers()),
                        self._listen(signal),
                        self._poll_stops(),
                        self._watch_disks(),
                        *(runner.watch(self._runner_changed) for runner in self.capabilities.runners.values()),
                        upkeep.run(),
                        duties.run(),
                    )
                ]
                await self._log_failure(upkeep.recover_dead())
                self.started.set()
                await self._claim_loop(once=once)
                await self._drain()
                for helper in helpers:
                    helper.cancel()
            lock.keep_file = bool(self._held_leases)
            if not self._held_leases:
                with contextlib.suppress(StoreError):
                    await duties.resign()
                    await upkeep.report()
                    await self._store.workers.delete(self.id)
        await self._function_executor.close()
        self.stuck = self._function_executor.stuck

    @contextlib.asynccontextmanager
    async def _all_tasks(self) -> AsyncIterator[asyncio.TaskGroup]:
        """Open the one task group; abandon it if draining takes too long because the database is unavailable."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                yield group
        except* _DrainTimedOut:
            log.warning("draining took too long; exiting, and %d leases will expire", len(self._held_leases))

    async def _register(self) -> None:
        await self._store.workers.register(
            self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=self._slots.queues,
            capabilities=self.capabilities.available,
            domains=self.capabilities.domains,
            away=self.capabilities.away,
            ttl=self._settings.lease_ttl,
        )

    async def _register_functions(self) -> None:
        await self._store.workers.register_functions(
            [(function.name, function.revision, function.defaults) for function in self._functions.all]
        )

    @property
    def draining(self) -> bool:
        return self._services.draining.is_set()

    @property
    def adopted(self) -> int:
        """How many of its running jobs were adopted from another worker."""
        return sum(held.lease.adopted for held in self._held_leases.all())

    def _upkeep(self) -> Upkeep:
        return Upkeep(
            self._store,
            self.id,
            self._settings,
            locks=self._locks,
            runners=list(self.capabilities.runners.values()),
            held=lambda job_id: self._held_leases.get(job_id) is not None,
        )

    # Claiming

    async def _claim_loop(self, *, once: bool) -> None:
        failures = 0
        while not self._services.draining.is_set():
            self._wake_up.clear()
            try:
                await self._claim_round()
                failures = 0
                if self._slots.backlog:
                    continue
                if once and not self._slots.to_claim and not self._held_leases:
                    return
                await self._sleep(await self._until_due() if self._slots.any_free else self._settings.poll_interval)
            except Exception as error:
                # The next claim may work. A worker that exits here would take its running functions with it.
                failures += 1
                log.log(
                    level_of(error), "claim failed, retrying: %s", error, exc_info=not isinstance(error, StoreError)
                )
                await self._sleep(backoff(failures, base=0.1, cap=5.0))

    async def _claim_round(self) -> None:
        """Adopt if it is time, then claim from each queue that may have something, up to its free slots."""
        slots = self._slots
        if time.monotonic() >= self._adopt_at:
            self._adopt_at = time.monotonic() + self._settings.poll_interval
            await self._claim([], 0, self.capabilities.domains)
        for queue in [queue for queue in slots.queues if queue in slots.to_claim and slots.free(queue) > 0]:
            claimed = most = min(slots.free(queue), CLAIM)
            # Before the claim: a notification during the claim may be for a job that it did not see.
            slots.to_claim.discard(queue)
            try:
                claimed = await self._claim(self.capabilities.claimable(queue), most)
            finally:
                if claimed == most:
                    slots.to_claim.add(queue)
            caps = await self._store.queues.caps()
            slots.capped = {queue for queue in slots.queues if queue in caps}

    async def _claim(self, pairs: Sequence[Claimable], slots: int, domains: Sequence[str] = ()) -> int:
        """Adopt and claim jobs and run them. Return how many were claimed."""
        ttl = self._settings.lease_ttl

        async def claim() -> Sequence[Lease]:
            found = await self._store.leases.claim(self.id, pairs, slots=slots, ttl=ttl, domains=domains)
            return [*found.adopted, *found.claimed]

        held_leases = await self.take(claim)
        adopted = sum(held.lease.adopted for held in held_leases)
        if adopted:  # There may be more than one claim adopts.
            self._adopt_at = 0.0
            self._wake_up.set()
        return len(held_leases) - adopted

    async def take(self, claim: Callable[[], Awaitable[Sequence[Lease]]]) -> Sequence[HeldLease]:
        """Run the jobs that a claim returns."""
        requested = boottime()
        self._held_leases.begin_claim()
        try:
            held_leases = self._held_leases.take(await claim(), requested)
        finally:
            self._held_leases.end_claim()
        for held in held_leases:
            self._slots.take(held.lease.queue)
        if not self._to_launch:
            # Later, so that the next claim is sent first: the database works while we start these jobs.
            asyncio.get_running_loop().call_soon(self._launch_waiting)
        self._to_launch += held_leases
        return held_leases

    async def _until_due(self) -> float:
        """Return the seconds until the next claim: a poll, or sooner if a delayed job falls due. Promotes due jobs."""
        poll = jitter(self._settings.poll_interval)
        due = await self._store.next_due()
        if due is None or due > poll:
            return poll
        if due <= 0 and not await self._store.gates.promote(PROMOTE):
            return poll
        return due

    async def _sleep(self, seconds: float) -> None:
        """Wait for a nudge, at most `seconds`; after a timeout, every queue may have jobs."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake_up.wait()
        except TimeoutError:
            self._slots.claim_from_all()
            self._store.notifications.poll()
            self._adopt_at = 0.0

    # Running

    def _launch_waiting(self) -> None:
        held_leases, self._to_launch = self._to_launch, []
        for held in held_leases:
            self._launch(held)

    def _launch(self, held: HeldLease) -> None:
        assert self._group is not None
        lease = held.lease
        if lease.adopted and lease.domain == FUNCTION_DOMAIN:
            self._function_executor.settle_orphan(held)
        elif lease.runner == FUNCTION:
            self._function_executor.launch(held)
        else:
            self._group.create_task(self._execute(held))

    async def _execute(self, held: HeldLease) -> None:
        """Run an attempt. If this task is cancelled, the lease stays ours: the next worker of this host recovers it."""
        execution = AttemptExecution(self._services, self.capabilities.runners[held.lease.runner], held)
        try:
            await execution.run()
        except Exception:
            log.exception("job %s: internal error in its execution; handing it over", held.lease.id)
            with contextlib.suppress(Exception):
                await self._services.hand_overs.ask(
                    HandOverRequest(held.lease, delay=CRASHED_DELAY, failed=True, reason="failed")
                )
        self._release(held)
        await self._clear(execution)

    async def _clear(self, execution: AttemptExecution) -> None:
        self._slots.clearing += 1
        try:
            await execution.clear()
        finally:
            self._settled.set()
            if self._slots.end_clearing():
                self._wake_up.set()

    def _release(self, held: HeldLease) -> None:
        """Drop a lease and free its slot."""
        self._held_leases.drop(held)
        self._settled.set()
        if held.on_release is not None:
            held.on_release()
        queue = held.lease.queue
        self._slots.release(queue)
        if queue in self._slots.queues and (queue in self._slots.to_claim or not self._held_leases):
            self._wake_up.set()

    # Notifications and stop requests

    def _on_heartbeat(self, result: HeartbeatResult) -> None:
        """Act on the answers of a heartbeat. For a job that is being finished, only the finish decides."""
        for held in result.lost:
            if self._held_leases.get(held.lease.id) is held and not held.finishing:
                held.lose()
        for held, beat in result.stops:
            held.receive_stop(beat.stop_request)
        if result.unknown and self._group is not None:
            log.warning("%d claims whose reply was lost; releasing them", len(result.unknown))
            self._group.create_task(self._log_failure(self._store.leases.release_unknown(self.id, result.unknown)))
        if not result.registered and self._group is not None and not self._services.draining.is_set():
            self._group.create_task(self._log_failure(self._register()))
        if result.draining and not self._services.draining.is_set():
            self.drain()

    def _runner_changed(self) -> None:
        """Register again after an engine or disk became available or unavailable, and try to claim."""
        if self._group is not None and not self._services.draining.is_set():
            self._group.create_task(self._log_failure(self._register()))
            self._slots.claim_from_all()
            self._adopt_at = 0.0
            self._wake_up.set()

    async def _watch_disks(self) -> None:
        """Stop claiming while a disk is below its reserve, and resume when it has room again."""
        before: Mapping[str, str] = {}
        while True:
            low = await self._services.disks.look()
            for name in low.keys() - before.keys():
                log.warning("no job starts here until there is room again: %s", low[name])
            for name in before.keys() - low.keys():
                log.warning("the disk of the %s has room again; jobs start here again", name)
            if low.keys() != before.keys():
                self._runner_changed()
            before = low
            await asyncio.sleep(LOOK_SECONDS)

    async def _listen(self, signal: TopicSignal) -> None:
        while True:
            topics = await signal.wait(3600.0)
            if topics & {"*", notify.ANY_WORK}:
                self._slots.claim_from_all()
            else:
                self._slots.to_claim.update(queue for queue in self._slots.queues if notify.work_topic(queue) in topics)
            if topics & {"*", notify.ORPHAN}:
                self._adopt_at = 0.0
            if topics:
                self._wake_up.set()
            if topics & {"*", notify.STOP} and len(self._held_leases):
                await self._log_failure(self._read_stops())

    async def _poll_stops(self) -> None:
        """Poll for stop requests, in case a notification is lost."""
        while True:
            await asyncio.sleep(jitter(min(self._settings.poll_interval, 0.8)))
            if len(self._held_leases):
                await self._log_failure(self._read_stops())

    async def _read_stops(self) -> None:
        for job_id, stop in (await self._store.leases.stop_requests(self.id)).items():
            held = self._held_leases.get(job_id)
            if held is not None:
                held.receive_stop(stop)

    async def _log_failure(self, work: Awaitable[object]) -> None:
        """Await something whose failure is only logged, because it is retried later anyway."""
        try:
            await work
        except Exception as error:
            log.log(
                level_of(error),
                "background call failed, a later one repeats it: %s",
                error,
                exc_info=not isinstance(error, StoreError),
            )

    # Draining

    async def _drain(self) -> None:
        """Drain: functions get their grace period, supervised attempts are handed over immediately."""
        self._launch_waiting()
        self._services.draining.set()
        for held in self._held_leases.all():
            if held.on_change is not None and held.lease.runner != FUNCTION:
                held.on_change()
        try:
            async with asyncio.timeout(self._settings.drain_grace + DRAIN_SECONDS):
                await self._function_executor.drain(self._settings.drain_grace)
                while self._held_leases or self._slots.clearing:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            raise _DrainTimedOut from None


class _DrainTimedOut(Exception):
    """Draining took too long."""
