"""The worker: adopts, claims, and runs what it took, until it is told to leave.

One task group holds all of it: the loop that claims, the ears (wake-ups, polls for stop requests), the writers, the
chores, and one task per job. The heartbeat has a thread of its own. The database may go away and come back; a worker
that is told to leave hands over what can go on without it.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from holdfast.config import Settings
from holdfast.duties.leading import Duties
from holdfast.errors import StoreError
from holdfast.model import FUNCTION_DOMAIN, Claimable, Lease, new_worker_id
from holdfast.runner.base import Runner
from holdfast.runner.function import Functions
from holdfast.runner.host import Locks
from holdfast.runner.shared_folder import SharedFolder
from holdfast.store import Store, wake
from holdfast.store.outage import asked_again, level_of
from holdfast.store.wake import Signal
from holdfast.timing import backoff, jitter
from holdfast.worker.chores import Chores
from holdfast.worker.completer import Handed
from holdfast.worker.desk import Desk, Step
from holdfast.worker.executor import Execution
from holdfast.worker.functions import FunctionRuns
from holdfast.worker.heart import Beats, Heard, Heart
from holdfast.worker.lease import Hold, Holds, boottime

log = logging.getLogger(__name__)

CRASHED_DELAY = 5.0
PROMOTE = 1000
CLAIM = 500
"""Jobs in one claim, at most: while they run, the database picks the next ones."""
CLEARING = 32
"""Attempts that are over and still being removed, at most, before something new is taken."""
LEAVE_SECONDS = 10.0
"""How long the last writes may take when a worker leaves; then its leases have to expire."""


class Worker:
    """Runs jobs of its queues. `queues` says how many of each at once."""

    def __init__(
        self,
        store: Store,
        *,
        installation: str,
        shared: SharedFolder,
        settings: Settings,
        queues: Mapping[str, int],
        runners: Sequence[Runner],
        functions: Functions,
        locks: Locks,
        connect_beats: Callable[[], Awaitable[tuple[Beats, Callable[[], Awaitable[None]]]]],
        worker_id: str | None = None,
        at: Step | None = None,
    ) -> None:
        self.id = worker_id or new_worker_id()
        self._store = store
        self._settings = settings
        self._queues = dict(queues)
        self._runners = {runner.capability: runner for runner in runners}
        self._functions = functions
        self._locks = locks
        self._connect_beats = connect_beats
        self._holds = Holds(settings.lease_ttl)
        self._desk = Desk(store, self.id, settings, installation, shared, at)
        threads = sum(queues.values()) or settings.max_concurrency
        self._runs = FunctionRuns(self._desk, functions, threads=threads, done=self._release)
        self._busy: Counter[str] = Counter()
        self._clearing = 0
        """How many attempts are over, their slots free, and still being removed."""
        self._hungry = set(self._queues)
        """Queues that may have something to claim."""
        self._capped: set[str] = set()
        """Queues that have a cap over all workers, as far as the last claims showed."""
        self._nudge = asyncio.Event()
        self._settled = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self.started = asyncio.Event()
        self._signals = 0
        self.stuck = False
        """Whether a function did not end: its thread would keep the process."""

    def signalled(self) -> None:
        """A signal came: leave. A second one: end at once."""
        self._signals += 1
        if self._signals > 1:
            log.warning("told a second time: leaving at once; %d leases will expire", len(self._holds))
            os._exit(1)
        self.leave()

    def leave(self) -> None:
        """Take nothing new, hand over, and end."""
        self._desk.leaving.set()
        self._nudge.set()
        for hold in self._holds.all():
            if hold.on_change is not None and hold.lease.runner != "function":
                hold.on_change()

    async def run(self, *, once: bool = False) -> None:
        """Work until told to leave; with `once`, until nothing is left to claim."""
        with self._locks.hold(self.id) as lock:
            await asked_again(self._register)
            await asked_again(self._register_functions)
            heart = Heart(
                self.id,
                self._holds,
                interval=self._settings.heartbeat_interval,
                connect=self._connect_beats,
                hear=self._heard,
            )
            duties = Duties(self._store, self.id, self._settings)
            chores = self._chores()
            async with heart, self._store.wake.listening() as signal, self._all_tasks() as group:
                helpers = [
                    group.create_task(loop)
                    for loop in (
                        *(writer.run() for writer in self._desk.writers()),
                        self._listen(signal),
                        self._look_for_stops(),
                        *(runner.watch(self._runner_changed) for runner in self._runners.values()),
                        chores.run(),
                        duties.run(),
                    )
                ]
                self.started.set()
                await self._claim_on(once=once)
                await self._wind_up()
                for helper in helpers:
                    helper.cancel()
            lock.leaves_something = bool(self._holds)
            if not self._holds:
                with contextlib.suppress(StoreError):
                    await duties.resign()
                    await chores.report()
                    await self._store.workers.forget(self.id)
        await self._runs.close()
        self.stuck = self._runs.stuck

    @contextlib.asynccontextmanager
    async def _all_tasks(self) -> AsyncIterator[asyncio.TaskGroup]:
        """The one task group; given up when leaving takes too long because the database is away."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                yield group
        except* _Given:
            log.warning("leaving took too long: %d leases will expire", len(self._holds))

    async def _register(self) -> None:
        await self._store.workers.register(
            self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=self._queues,
            capabilities=self._capabilities,
            domains=self._domains,
            away={runner.capability: away for runner in self._runners.values() if (away := runner.away) is not None},
            ttl=self._settings.lease_ttl,
        )

    async def _register_functions(self) -> None:
        await self._store.workers.register_functions(
            [(function.name, function.revision, function.defaults) for function in self._functions.all]
        )

    @property
    def _capabilities(self) -> list[str]:
        able = [runner.capability for runner in self._runners.values() if runner.away is None]
        return [*able, *(f"function:{name}" for name in self._functions.names)]

    @property
    def _domains(self) -> list[str]:
        return [FUNCTION_DOMAIN, *(domain for runner in self._runners.values() for domain in runner.domains)]

    @property
    def leaving(self) -> bool:
        return self._desk.leaving.is_set()

    @property
    def adopted(self) -> int:
        """How many of the jobs in its hands another worker began."""
        return sum(hold.lease.adopted for hold in self._holds.all())

    def domain_of(self, capability: str) -> str | None:
        """Where an attempt would run that needs this; None if it cannot start here now."""
        if capability.startswith("function:"):
            known = capability.removeprefix("function:") in self._functions.names
            return FUNCTION_DOMAIN if known else None
        runner = self._runners.get(capability)
        return runner.domain if runner is not None and runner.away is None else None

    def _chores(self) -> Chores:
        return Chores(
            self._store,
            self.id,
            self._settings,
            locks=self._locks,
            runners=list(self._runners.values()),
            held=lambda job_id: self._holds.get(job_id) is not None,
        )

    # Claiming

    async def _claim_on(self, *, once: bool) -> None:
        failures = 0
        while not self._desk.leaving.is_set():
            self._nudge.clear()
            try:
                await self._claim_round()
                failures = 0
                if self._backlog():
                    continue
                if once and not self._hungry and not self._holds:
                    return
                await self._rest(await self._until_due() if self._room() else self._settings.poll_interval)
            except Exception as error:
                # Whatever it was, the next one may work; a worker that ends here takes its functions with it.
                failures += 1
                log.log(level_of(error), "claim failed: %s", error, exc_info=not isinstance(error, StoreError))
                await self._rest(backoff(failures, base=0.1, cap=5.0))

    def _backlog(self) -> bool:
        """Whether a queue that may have work has room for it."""
        return any(self._free(queue) > 0 for queue in self._hungry)

    def _room(self) -> bool:
        return any(self._free(queue) > 0 for queue in self._queues)

    def _free(self, queue: str) -> int:
        return self._queues[queue] - self._busy[queue] if self._clearing < CLEARING else 0

    async def _claim_round(self) -> None:
        """Adopt, then claim from each queue that may have something, up to its free slots."""
        queues = [queue for queue in self._queues if queue in self._hungry and self._free(queue) > 0]
        if not queues:
            await self._claim([], 0, self._domains)
        for n, queue in enumerate(queues):
            claimed = slots = min(self._free(queue), CLAIM)
            self._hungry.discard(queue)  # Before the claim: a wake-up during it may be about what it did not see.
            try:
                claimed = await self._claim(self._pairs(queue), slots, self._domains if n == 0 else ())
            finally:
                if claimed == slots:
                    self._hungry.add(queue)
            caps = await self._store.queues.caps()
            self._capped = {queue for queue in self._queues if queue in caps}

    async def _claim(self, pairs: Sequence[Claimable], slots: int, domains: Sequence[str]) -> int:
        """Adopt, claim, and run what came; return how many were claimed."""
        ttl = self._settings.lease_ttl

        async def claim() -> Sequence[Lease]:
            found = await self._store.leases.claim(self.id, pairs, slots=slots, ttl=ttl, domains=domains)
            return [*found.adopted, *found.claimed]

        return sum(not hold.lease.adopted for hold in await self.take(claim))

    async def take(self, claim: Callable[[], Awaitable[Sequence[Lease]]]) -> Sequence[Hold]:
        """Run what a claim brings."""
        requested = boottime()
        self._holds.begin_claim()
        try:
            holds = self._holds.take(await claim(), requested)
        finally:
            self._holds.end_claim()
        for hold in holds:
            self._launch(hold)
        return holds

    def _pairs(self, queue: str) -> list[Claimable]:
        functions = [
            Claimable(queue=queue, capability=f"function:{name}", domain=FUNCTION_DOMAIN)
            for name in self._functions.names
        ]
        runners = [
            Claimable(queue=queue, capability=runner.capability, domain=runner.domain)
            for runner in self._runners.values()
            if runner.away is None
        ]
        return functions + runners

    async def _until_due(self) -> float:
        """Seconds until the next look: a poll, or sooner when a delayed job falls due, which is then let out."""
        poll = jitter(self._settings.poll_interval)
        due = await self._store.next_due()
        if due is None or due > poll:
            return poll
        if due <= 0 and not await self._store.gates.promote(PROMOTE):
            return poll
        return due

    async def _rest(self, seconds: float) -> None:
        """Wait for a nudge, or so long; then every queue may have something."""
        try:
            async with asyncio.timeout(seconds):
                await self._nudge.wait()
        except TimeoutError:
            self._hungry.update(self._queues)

    # Running

    def _launch(self, hold: Hold) -> None:
        assert self._group is not None
        lease = hold.lease
        if lease.queue in self._queues:
            self._busy[lease.queue] += 1
        if lease.runner != "function":
            self._group.create_task(self._execute(hold))
        elif lease.adopted:
            self._runs.settle_orphan(hold)
        else:
            self._runs.launch(hold)

    async def _execute(self, hold: Hold) -> None:
        """Attend to an attempt. If we are given up (cancelled), it stays ours: the host's next worker finds it so."""
        execution = Execution(self._desk, self._runners[hold.lease.runner], hold)
        try:
            await execution.run()
        except Exception:
            log.exception("job %s: its supervision failed; handing it back", hold.lease.id)
            with contextlib.suppress(Exception):
                await self._desk.hand_overs.ask(Handed(hold.lease, delay=CRASHED_DELAY, worn=True, reason="failed"))
        self._release(hold)
        await self._clear(execution)

    async def _clear(self, execution: Execution) -> None:
        self._clearing += 1
        try:
            await execution.clear()
        finally:
            self._clearing -= 1
            self._settled.set()
            if self._clearing == CLEARING - 1:
                self._nudge.set()

    def _release(self, hold: Hold) -> None:
        """A job is no longer ours: its slot is free."""
        self._holds.drop(hold)
        self._settled.set()
        if hold.on_release is not None:
            hold.on_release()
        queue = hold.lease.queue
        if queue in self._queues:
            self._busy[queue] -= 1
            if queue in self._capped:
                self._hungry.add(queue)  # It took less than it had room for: perhaps only because of the cap.
            if queue in self._hungry or not self._holds:
                self._nudge.set()

    # Hearing

    def _heard(self, heard: Heard) -> None:
        """Act on what a heartbeat brought. A job that is being finished hears from its finish alone."""
        for hold in heard.lost:
            if self._holds.get(hold.lease.id) is hold and not hold.finishing:
                hold.lose()
        for hold, beat in heard.stops:
            hold.hear_stop(beat.stop_request)
        if heard.unknown and self._group is not None:
            log.warning("%d jobs were claimed by this worker, and it never heard of them", len(heard.unknown))
            self._group.create_task(self._quietly(self._store.leases.give_back(self.id, heard.unknown)))
        if not heard.registered and self._group is not None and not self._desk.leaving.is_set():
            self._group.create_task(self._quietly(self._register()))
        if heard.draining and not self._desk.leaving.is_set():
            self.leave()

    def _runner_changed(self) -> None:
        """An engine came or went: say so, and take what it brings."""
        if self._group is not None and not self._desk.leaving.is_set():
            self._group.create_task(self._quietly(self._register()))
            self._hungry.update(self._queues)
            self._nudge.set()

    async def _listen(self, signal: Signal) -> None:
        while True:
            topics = await signal.wait(3600.0)
            if "*" in topics:
                self._hungry.update(self._queues)
            else:
                self._hungry.update(queue for queue in self._queues if wake.work(queue) in topics)
            if topics:
                self._nudge.set()
            if topics & {"*", wake.STOP} and len(self._holds):
                await self._quietly(self._hear_stops())

    async def _look_for_stops(self) -> None:
        """Poll for stop requests, for when no wake-up comes."""
        while True:
            await asyncio.sleep(jitter(min(self._settings.poll_interval, 0.8)))
            if len(self._holds):
                await self._quietly(self._hear_stops())

    async def _hear_stops(self) -> None:
        for job_id, stop in (await self._store.leases.stops(self.id)).items():
            hold = self._holds.get(job_id)
            if hold is not None:
                hold.hear_stop(stop)

    async def _quietly(self, work: Awaitable[object]) -> None:
        """Do something that will be tried again anyway."""
        try:
            await work
        except Exception as error:
            log.log(level_of(error), "%s", error, exc_info=not isinstance(error, StoreError))

    # Leaving

    async def _wind_up(self) -> None:
        """Let go of everything: functions have their grace, what runs elsewhere is handed over at once."""
        self._desk.leaving.set()
        for hold in self._holds.all():
            if hold.on_change is not None and hold.lease.runner != "function":
                hold.on_change()
        try:
            async with asyncio.timeout(self._settings.drain_grace + LEAVE_SECONDS):
                await self._runs.drain(self._settings.drain_grace)
                while self._holds or self._clearing:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            raise _Given from None


class _Given(Exception):
    """Leaving took too long."""
