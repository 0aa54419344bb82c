"""One attempt under a supervisor, from its claim or adoption to its end: prepare → start or adopt → wait → collect →
classify → finish, each a small step.

Whatever happens to this worker, at whatever step: the next one finds the attempt by its identity and goes on there. A
lost lease ends the execution at once, with nothing written and nothing touched.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.budgets import EXCEEDED
from holdfast.errors import NotFound, SharedFolderAway, StoreError
from holdfast.model import Cause, Error, Outcome, Phase, Status, StopKind, StopPhase, StopRequest
from holdfast.runner.base import CannotStart, End, EngineUnreachable, Identity, Order, Runner, Running, TooLate
from holdfast.runner.secrets import NO_MASK, Mask, find_secrets
from holdfast.timing import backoff, jitter
from holdfast.worker.classify import classify
from holdfast.worker.completer import Handed, retried
from holdfast.worker.desk import Desk
from holdfast.worker.journal import Journal
from holdfast.worker.last_error import LastError
from holdfast.worker.lease import Hold, Lost, boottime, until_trusted
from holdfast.worker.pipeline import Pipeline
from holdfast.worker.readiness import Unready, make_ready
from holdfast.worker.recent import recent_events
from holdfast.worker.shipper import Shipper
from holdfast.worker.speech import Speech
from holdfast.worker.taking import OutputsWait, take_outputs

log = logging.getLogger(__name__)

QUICK, SLOW = 0.25, 1.0
"""Seconds between looks at the output: while there is some, and when it has been quiet for a while."""
LATE_STARTS, LATE_SECONDS = 5, 30.0
"""How often a start may come too late for its lease, and the longest pause before another one."""
STOPPED_TRIES = 3
"""How often the outputs of a job are tried to be kept that somebody asked to stop: it need not wait for room."""
ITS_OWN = (Cause.EXIT, Cause.OUT_OF_MEMORY, Cause.TIMED_OUT, Cause.IDLE_TIMEOUT)
"""Ends that say something about the command, and not about a request or a loss."""
AWAY_SECONDS = 5.0
"""How long what could not be looked at waits for an adopter, when its engine is away."""


class HandOver(Exception):
    """This worker leaves; what runs goes on, and the next worker adopts it."""


class Execution:
    """One attempt in this worker's hands."""

    def __init__(self, desk: Desk, runner: Runner, hold: Hold) -> None:
        self._desk = desk
        self._runner = runner
        self._hold = hold
        self._lease = hold.lease
        self._policy = hold.lease.policy
        self._journal = Journal(desk.store, hold.lease)
        self._running: Running | None = None
        self._changed = asyncio.Event()
        self._speech = Speech(desk, hold)
        self._over = False
        """Whether it is known that nothing of it can start any more."""
        self._over_budget: str | None = None
        self._mask = NO_MASK
        self._ended = False
        self._pipeline: Pipeline | None = None
        if "tasks" in self._lease.spec:
            self._pipeline = Pipeline(desk, runner, hold, self._stopped_or_leaving)

    async def run(self) -> Status | None:
        """Carry the attempt to its end; return the job's status then, or None if it is no longer ours."""
        lease = self._lease
        self._hold.on_change = self._changed.set
        if (stop := lease.adoption.stop_request) is not None:
            self._hold.stop = stop
            self._speech.told = stop.phase
        try:
            self._at("claimed")
            end = await self._execute()
            outcome = classify(end, lease)
            self._at("classified")
            status = await self._finish(outcome)
            self._ended = status is not None
            if status is None:
                await self._drop_outputs()
            self._at("finished")
            return status
        except Lost:
            log.info("job %s attempt %d: the lease is lost; leaving it alone", lease.id, lease.attempt)
            return None
        except HandOver:
            await self._desk.hand_overs.ask(Handed(lease))
            return None
        except EngineUnreachable as error:
            log.warning("job %s attempt %d waits to be adopted: %s", lease.id, lease.attempt, error)
            self._runner.doubt()
            await self._desk.hand_overs.ask(Handed(lease, delay=jitter(AWAY_SECONDS), reason="engine_unreachable"))
            return None
        finally:
            if self._running is not None:
                self._running.close()

    async def clear(self) -> None:
        """Remove what an attempt left here whose end is in the record. What cannot be removed now is for the sweep."""
        if self._ended and self._running is not None:
            try:
                await self._running.remove(others_held_it=self._lease.adopted)
                self._at("removed")
            except Exception as error:
                log.warning("job %s attempt %d: not removed yet: %s", self._lease.id, self._lease.attempt, error)

    async def _execute(self) -> End:
        begun = await self._begin()
        if isinstance(begun, End):
            return begun
        self._running = running = begun
        if self._policy.secrets:
            self._mask = Mask(await running.secrets())
        if self._policy.stop_after is not None:
            self._hold.on_renewed = self._renew_stop_after
        if self._lease.adoption.phase is Phase.CLAIMED and not await self._desk.starts.ask(self._lease):
            raise Lost
        self._at("started")
        shipper = await self._supervise(running)
        self._at("exited")
        end = await self._collect(running)
        if end.said is not None and not await shipper.mark_missing(end.said):
            raise Lost
        end = await self._explained(end, shipper.last_error)
        return msgspec.structs.replace(end, error=self._mask.error(end.error)) if self._mask else end

    # Prepare, start, adopt

    async def _begin(self) -> Running | End:
        """Find what runs or ran, or start it."""
        lease = self._lease
        if lease.adopted or lease.attempt > 1:
            self._journal.logged = await retried(lambda: self._desk.store.events.logged(lease.id), "a look at the log")
        if not lease.adopted:
            return await self._prepare() or await self._start()
        while True:
            begun = await self._find() or await self._prepare() or await self._start()
            # What ends here without a start must not be started by whoever had it before and is still on the way.
            if not isinstance(begun, End) or self._over:
                return begun
            if not await until_trusted(self._hold):  # Somebody else's now, to start or not.
                raise Lost
            if await self._runner.forbid(self._identity, lease.domain):
                return begun
            await self._wait(jitter(QUICK))

    async def _find(self) -> Running | End | None:
        """Look for what another worker began; None: nothing ran, and it is ours to start."""
        adoption = self._lease.adoption
        state, running = await self._runner.find(
            self._identity, self._lease.domain, stdout=adoption.stdout_offset, stderr=adoption.stderr_offset
        )
        if state not in ("missing", "forbidden"):
            if self._pipeline is not None:
                await self._pipeline.adopt(running)
            await self._take_over(running, running_now=state == "running")
            return running
        running.close()
        self._over = True
        if state == "forbidden":
            return End(cause=Cause.DRAINED)
        if adoption.phase is Phase.STARTED or self._lease.domain != self._runner.domain:
            return self._nothing_left()
        self._over = False
        self._speech.adopted.clear()  # Its former owner's supervisor may begin before ours does.
        return None

    def _nothing_left(self) -> End:
        message = "nothing of it was found where it ran"
        return self._unless_stopped(End(cause=Cause.LOST, error=Error(code="lost", message=message)))

    async def _take_over(self, running: Running, *, running_now: bool) -> None:
        """Tell its supervisor whose it is now. Commands of its former owner are refused from then on."""
        self._at("found")
        if running_now:
            self._speech.adopted.clear()
            await self._speech.hold_if_adopting(running)
            if self._policy.stop_after is not None:
                self._speech.renew_stop_after(running, self._hold.renewed_at)

    async def _prepare(self) -> End | None:
        """What is to be known before the start: whether it is still wanted, and whether what it needs is ready."""
        self._hold.hear_stop(await self._desk.stops.ask(self._lease))
        if self._hold.stop is None and (self._lease.lane is not None or self._policy.check is not None):
            try:
                await make_ready(self._desk.store, self._lease, until=self._stopped_or_leaving)
            except Unready as error:
                return End(cause=Cause.INTERRUPTED, error=Error(code="not_ready", message=str(error)))
        end = None
        if self._hold.stop is None and self._pipeline is not None:
            end = await self._pipeline.begin()
        if (unwanted := self._unwanted()) is not None:
            return unwanted
        self._at("prepared")
        return end

    def _unwanted(self) -> End | None:
        """How it ends if it is not to be started any more."""
        self._check_lease()
        if self._desk.leaving.is_set():
            raise HandOver
        return None if self._hold.stop is None else End(cause=_cause(self._hold.stop))

    def _stopped_or_leaving(self) -> bool:
        return self._hold.lost or self._hold.stop is not None or self._desk.leaving.is_set()

    async def _start(self) -> Running | End:
        """Start it. What comes too late is tried again, after a pause: the machine or its engine has too much to do."""
        lease = self._lease
        for late in range(1, LATE_STARTS + 1):
            try:
                async with self._runner.turn():
                    began = boottime()
                    if (unwanted := self._unwanted()) is not None:
                        return unwanted
                    running = await self._runner.start(await self._order(), self._confirm)
                self._at("spawned")
                return running
            except TooLate:
                took = boottime() - began
                log.warning("job %s attempt %d: start %d came too late, %.1f s", lease.id, lease.attempt, late, took)
                if late < LATE_STARTS:  # Those that were late together are not to come together again.
                    await self._wait(jitter(backoff(late, base=max(QUICK, took), cap=LATE_SECONDS), 0.9))
            except CannotStart as error:
                return End(cause=Cause.START_FAILED, error=error.error)
        message = f"it was started {LATE_STARTS} times, and each time too late for its lease"
        return End(cause=Cause.START_FAILED, error=Error(code="start_failed", message=message))

    async def _order(self) -> Order:
        """What is to be started, by when: as long as the lease can be trusted from now on."""
        lease, policy = self._lease, self._policy
        if not await until_trusted(self._hold):
            raise Lost
        least = 2 * self._desk.settings.heartbeat_interval
        if policy.stop_after is not None and policy.stop_after < least:
            message = f"stop_after is {policy.stop_after:g} s; here it must be at least {least:g} s: two heartbeats"
            raise CannotStart("contract_violation", message)
        secrets = find_secrets(policy.secrets, self._desk.settings.secrets_dir)
        files = await asyncio.to_thread(self._files) if policy.uploads else {}
        return Order(
            identity=self._identity,
            domain=lease.domain,
            token=lease.token,
            spec=lease.spec,
            inputs=lease.inputs,
            start_by=self._hold.trusted_until,
            timeout=policy.timeout or self._desk.settings.timeout,
            idle_timeout=policy.idle_timeout,
            stop_grace=policy.stop_grace,
            stop_after=None if policy.stop_after is None else self._hold.renewed_at + policy.stop_after,
            secrets=secrets,
            files=files,
            pipeline=None if self._pipeline is None else self._pipeline.staged(),
        )

    def _files(self) -> Mapping[str, Path]:
        try:
            return self._desk.inputs.given(self._lease.id, self._policy.uploads)
        except NotFound as error:
            self._check_shared_folder()
            message = f"what was uploaded for it is not in the shared folder of this worker: {error}"
            raise CannotStart("start_failed", message) from error

    def _check_shared_folder(self) -> None:
        """A job is not to fail because this host's shared folder is away: another worker may have it."""
        try:
            self._desk.shared.check()
        except SharedFolderAway as error:
            raise EngineUnreachable(error.message) from error

    async def _confirm(self) -> None:
        """Ask the record whether the attempt is still ours, just before something starts that asks nobody itself."""
        self._at("created")
        if not await until_trusted(self._hold):
            raise Lost
        store, lease = self._desk.store, self._lease
        if not await retried(lambda: store.leases.holds(self._desk.worker, lease), "a look at the lease"):
            raise Lost
        self._at("confirmed")

    # Wait

    async def _supervise(self, running: Running) -> Shipper:
        """Ship the output and carry out stop requests until the end, and then to the end of the log."""
        cap = self._desk.settings.log_max_bytes
        names = () if self._pipeline is None else self._pipeline.names
        shipper = Shipper(running, self._journal, cap=cap, hear=self._hear, mask=self._mask, tasks=names)
        running.watch(self._changed.set)
        async with self._driven(running):
            await self._attend(running, shipper)
        self._check_lease()
        await self._ship_rest(shipper)
        await self._speech.tell_rungs()
        if self._pipeline is not None:
            await self._pipeline.settle()
        return shipper

    async def _attend(self, running: Running, shipper: Shipper) -> None:
        quiet = 0
        while not running.over:
            self._check_lease()
            if self._desk.leaving.is_set():
                await shipper.ship()
                raise HandOver
            await self._speech.hold_if_adopting(running)
            await self._speech.stop_if_asked(running, over_budget=self._over_budget is not None)
            await self._wait(0.0 if shipper.more else self._pace(quiet))
            before = self._journal.committed
            await self._ship(shipper)
            quiet = quiet + 1 if self._journal.committed == before else 0

    def _pace(self, quiet: int) -> float:
        if self._pipeline is not None:
            return self._pipeline.pace
        return SLOW if quiet > 8 else QUICK

    @contextlib.asynccontextmanager
    async def _driven(self, running: Running) -> AsyncIterator[None]:
        """Drive a pipeline while the block lasts. What goes wrong there is raised here: it cancels the block."""
        if self._pipeline is None:
            yield
            return
        try:
            async with asyncio.TaskGroup() as group:
                driving = group.create_task(self._drive(self._pipeline, running))
                yield
                driving.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _drive(self, pipeline: Pipeline, running: Running) -> None:
        """Until its supervisor listens to us alone, what it says may still change."""
        await self._speech.adopted.wait()
        await pipeline.drive(running)

    async def _ship_rest(self, shipper: Shipper) -> None:
        """Ship to the end of the log, once its engine hands it out."""
        n = 0
        while True:
            try:
                if not await shipper.ship_rest():
                    raise Lost
                return
            except EngineUnreachable:
                n += 1
                await self._wait_for_engine(n)

    async def _wait_for_engine(self, n: int) -> None:
        """What ended is over, but how is known only to an engine that is away: wait for it, and for nothing else."""
        self._check_lease()
        if self._desk.leaving.is_set():
            raise HandOver
        await self._wait(jitter(backoff(n, base=0.1, cap=5.0)))

    async def _wait(self, seconds: float) -> None:
        """Wait until something changed: its end, its lease, a stop request, our leaving; at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def _ship(self, shipper: Shipper) -> None:
        if not await shipper.ship():
            raise Lost
        self._at("shipped")
        await self._speech.tell_rungs()
        self._over_budget = self._over_budget or self._journal.over_budget(self._policy.budget)

    def _hear(self, event: dict[str, Any]) -> None:
        """What a supervisor says of itself."""
        self._speech.hear(event)
        if self._pipeline is not None:
            self._pipeline.course.hear(event)

    def _renew_stop_after(self, requested: float) -> None:
        if self._running is not None:
            self._speech.renew_stop_after(self._running, requested)

    # Collect, finish

    async def _collect(self, running: Running) -> End:
        """Learn how it ended. What could not be killed is still running, and is told as such."""
        n = 0
        end: End | None = None
        while await until_trusted(self._hold):
            n += 1
            try:
                if (end := await running.collect()) is not None:
                    break
            except EngineUnreachable:
                await self._wait_for_engine(n)
                continue
            if self._desk.leaving.is_set():
                raise HandOver
            await self._speech.tell_rung(StopPhase.NOT_DEAD)
            await self._wait(jitter(backoff(n, base=0.2, cap=30.0)))
        if end is None:
            raise Lost
        self._at("collected")
        end = await self._with_outputs_at_last(running, await self._meant(end))
        if self._hold.stop is not None:
            await self._speech.tell_rung(StopPhase.DEAD)
        return end

    async def _with_outputs_at_last(self, running: Running, end: End) -> End:
        """Take what it left, again and again while the trouble is ours: there is only this one copy of it."""
        n = 0
        while True:
            try:
                return await take_outputs(self._desk, self._lease, running, end, self._mask, self._journal)
            except (OutputsWait, EngineUnreachable) as error:
                n += 1
                log.warning("job %s attempt %d: %s", self._lease.id, self._lease.attempt, error)
                if self._hold.stop is not None and n >= STOPPED_TRIES and isinstance(error, OutputsWait):
                    return End(cause=_cause(self._hold.stop), exit_code=end.exit_code, signal=end.signal)
                await self._wait_for_engine(n)

    async def _explained(self, end: End, heard: LastError) -> End:
        """Add the task that it ended in, and the last line on stderr, which a predecessor may have shipped."""
        if end.error is not None or end.cause not in ITS_OWN or (end.cause is Cause.EXIT and end.exit_code == 0):
            return end
        task = None if self._pipeline is None else self._pipeline.course.failed
        last = heard.line(task)
        if last is None and self._lease.adopted:
            shipped = LastError()
            shipped.hear_again(await recent_events(self._desk.store, self._lease))
            last = shipped.line(task)
        return msgspec.structs.replace(end, task=task, last_error=last)

    async def _meant(self, end: End) -> End:
        """Say what an end that we caused was for."""
        if end.cause in (Cause.CANCELLED, Cause.INTERRUPTED) and self._hold.stop is None:
            self._hold.hear_stop(await self._desk.stops.ask(self._lease))
            if self._hold.stop is None:
                over = self._over_budget or self._journal.over_budget(self._policy.budget)
                if over is not None:
                    error = Error(code=EXCEEDED, message=over)
                    return End(cause=end.cause, exit_code=end.exit_code, signal=end.signal, error=error)
                message = "it was stopped, and not by a request of this job"
                return End(cause=Cause.LOST, error=Error(code="lost", message=message))
        return self._unless_stopped(end)

    def _unless_stopped(self, end: End) -> End:
        """A stop that was asked for is the outcome of what ended by it, and of what turned out to be dead already."""
        stop = self._hold.stop
        if stop is None or end.cause not in (Cause.CANCELLED, Cause.INTERRUPTED, Cause.LOST):
            return end
        return End(cause=_cause(stop), exit_code=end.exit_code, signal=end.signal)

    async def _finish(self, outcome: Outcome) -> Status | None:
        self._check_lease()
        self._hold.finishing = True
        return await self._desk.finishes.ask((self._lease, outcome))

    async def _drop_outputs(self) -> None:
        """Remove what we collected for an attempt that is not in the record: its job has moved on, or was deleted."""
        lease = self._lease
        ours = (lease.id, lease.attempt, lease.token)
        try:
            if ours not in await self._desk.store.attempts.standing([lease.id]):
                await asyncio.to_thread(self._desk.artifacts.remove, lease.id, f"{lease.attempt}.{lease.token}")
        except StoreError as error:
            log.info("job %s attempt %d: its outputs are left to the sweep: %s", lease.id, lease.attempt, error)

    def _check_lease(self) -> None:
        if self._hold.lost:
            raise Lost

    def _at(self, step: str) -> None:
        self._desk.at(step, self._lease)

    @property
    def _identity(self) -> Identity:
        return Identity(self._desk.installation, self._lease.id, self._lease.attempt)


def _cause(stop: StopRequest) -> Cause:
    return Cause.INTERRUPTED if stop.kind is StopKind.INTERRUPT else Cause.CANCELLED
