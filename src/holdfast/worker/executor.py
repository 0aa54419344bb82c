"""One attempt under a supervisor, from its claim or adoption to its end: prepare → start or adopt → wait → collect →
classify → finish, each a small step.

If this worker dies at any step, the next one finds the attempt by its identity and continues there. A lost lease ends
the execution immediately: nothing is written or changed after that.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.budgets import EXCEEDED
from holdfast.errors import Invalid, NotFound, SharedFolderAway, SnapshotDamaged, SnapshotFailed, StoreError
from holdfast.limits import AttemptLimits
from holdfast.model import Cause, Error, Outcome, Phase, Status, StopKind, StopPhase, StopRequest
from holdfast.runner.base import (
    AttemptEnd,
    AttemptHandle,
    AttemptState,
    CannotStart,
    EngineUnreachable,
    Identity,
    Runner,
    StartRequest,
    TooLate,
)
from holdfast.runner.disk import DATABASE
from holdfast.runner.process import EXHAUSTED
from holdfast.runner.secrets import NO_MASK, Mask, find_secrets
from holdfast.submission import check_spec
from holdfast.timing import backoff, jitter
from holdfast.worker.batch_writer import HandOverRequest, with_retries
from holdfast.worker.classify import OUTPUTS_NOT_STORED, classify
from holdfast.worker.collect import CollectOutputs, OutputsNotStored, collect_outputs
from holdfast.worker.event_writer import EventWriter
from holdfast.worker.execution_services import ExecutionServices
from holdfast.worker.held_leases import HeldLease, LeaseLost, boottime, until_trusted
from holdfast.worker.last_error import LastError
from holdfast.worker.limits import broken_limit, watch_folder
from holdfast.worker.log_reader import LogReader
from holdfast.worker.pipeline_execution import PipelineExecution
from holdfast.worker.readiness import NotReady, make_ready
from holdfast.worker.recent import recent_events
from holdfast.worker.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)

QUICK, SLOW, SCARCE = 0.25, 1.0, 5.0
"""Seconds between reads of the output: while there is some, when it has been quiet for a while, and while the disk of
the database is below its reserve."""
LATE_STARTS, LATE_SECONDS = 5, 30.0
"""How many starts may miss the deadline of the lease, and the longest backoff between them."""
STOPPED_TRIES = 3
"""How often we try to store the outputs of a job that has a stop request: it need not wait for disk space."""
MAX_MESSAGE = 1000
"""Characters kept of the message of an unexpected error."""
ITS_OWN = (Cause.EXIT, Cause.OUT_OF_MEMORY, Cause.TIMED_OUT, Cause.IDLE_TIMEOUT)
"""Causes that are due to the command itself, not to a request or a loss."""
AWAY_SECONDS = 5.0
"""Delay before an attempt can be adopted after its engine was unreachable."""


class HandOverRequested(Exception):
    """This worker drains; the attempt keeps running and the next worker adopts it."""


class AttemptExecution:
    """One attempt that this worker carries out."""

    def __init__(self, services: ExecutionServices, runner: Runner, held: HeldLease) -> None:
        self._services = services
        self._runner = runner
        self._held = held
        self._lease = held.lease
        self._policy = held.lease.policy
        self._event_writer = EventWriter(services.store, held.lease)
        self._running: AttemptHandle | None = None
        self._changed = asyncio.Event()
        self._link = SupervisorLink(services, held)
        self._over = False
        """Whether it is certain that the attempt cannot start any more."""
        self._over_budget: str | None = None
        self._over_limit: Error | None = None
        self._limits = AttemptLimits()
        self._mask = NO_MASK
        self._ended = False
        self._pipeline: PipelineExecution | None = None
        if "tasks" in self._lease.spec:
            self._pipeline = PipelineExecution(services, runner, held, self._stopped_or_draining)

    async def run(self) -> Status | None:
        """Carry the attempt to its end. Return the job's new status, or None if the lease is no longer ours."""
        lease = self._lease
        self._held.on_change = self._changed.set
        if (stop := lease.adoption.stop_request) is not None:
            self._held.stop = stop
            self._link.recorded_phase = stop.phase
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
        except LeaseLost:
            log.info("job %s attempt %d: lease lost; the execution stops without writing", lease.id, lease.attempt)
            return None
        except HandOverRequested:
            await self._services.hand_overs.ask(HandOverRequest(lease))
            return None
        except EngineUnreachable as error:
            log.warning("job %s attempt %d: cannot continue here, handing over: %s", lease.id, lease.attempt, error)
            self._runner.note_failure()
            await self._services.hand_overs.ask(
                HandOverRequest(lease, delay=jitter(AWAY_SECONDS), reason="engine_unreachable")
            )
            return None
        finally:
            if self._running is not None:
                self._running.close()

    async def clear(self) -> None:
        """Remove the remains of an attempt whose end is recorded. What cannot be removed now is left to the sweep."""
        if self._ended and self._running is not None:
            try:
                await self._running.remove(had_other_owners=self._lease.adopted)
                self._at("removed")
            except Exception as error:
                log.warning(
                    "job %s attempt %d: clean-up left to the sweep: %s", self._lease.id, self._lease.attempt, error
                )

    async def _execute(self) -> AttemptEnd:
        begun = await self._begin_or_fail()
        while isinstance(begun, AttemptEnd):
            if (end := await self._with_known_outputs(begun)) is not None:
                return end
            begun = await self._begin_or_fail()
        self._running = running = begun
        self._limits = await running.limits()
        if self._policy.secrets:
            self._mask = Mask(await running.secrets())
        if self._pipeline is not None:
            self._pipeline.mask = self._mask
        if self._policy.stop_after is not None:
            self._held.on_renewed = self._renew_stop_after
        if self._lease.adoption.phase is Phase.CLAIMED and not await self._services.starts.ask(self._lease):
            raise LeaseLost
        self._at("started")
        log_reader = await self._supervise(running)
        self._at("exited")
        end = await self._collect(running)
        if end.said is not None and not await log_reader.note_missing(end.said):
            raise LeaseLost
        end = await self._explained(end, log_reader.last_error)
        return msgspec.structs.replace(end, error=self._mask.error(end.error)) if self._mask else end

    # Prepare, start, adopt

    async def _begin_or_fail(self) -> AttemptHandle | AttemptEnd:
        """Begin. An unexpected error fails the attempt with its message: another worker would hit it too."""
        try:
            return await self._begin()
        except (LeaseLost, HandOverRequested, EngineUnreachable, StoreError, MemoryError):
            raise
        except SharedFolderAway as error:
            raise EngineUnreachable(error.message) from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                raise EngineUnreachable(f"this host is exhausted: {error.strerror}") from error
            return await self._not_begun(error)

    async def _not_begun(self, error: Exception) -> AttemptHandle | AttemptEnd:
        """Fail an attempt that does not run, and make sure that it never will; if it does run, adopt it."""
        lease = self._lease
        log.error(
            "job %s attempt %d: unexpected error while starting",
            lease.id,
            lease.attempt,
            exc_info=error,
        )
        if not await until_trusted(self._held):
            raise LeaseLost
        if (running := (await self._find_begun())[1]) is not None:
            return running
        if not await self._runner.forbid(self._identity, lease.domain):
            raise error
        self._over = True
        mask = NO_MASK
        with contextlib.suppress(Exception):
            mask = Mask(find_secrets(self._policy.secrets, self._services.settings.secrets_dir).values())
        message = mask.text(f"it could not be started: {type(error).__name__}: {error}")[:MAX_MESSAGE]
        return AttemptEnd(cause=Cause.START_FAILED, error=Error(code="start_failed", message=message))

    async def _begin(self) -> AttemptHandle | AttemptEnd:
        """Find the attempt if it runs or ran; otherwise start it."""
        lease = self._lease
        if lease.adopted or lease.attempt > 1:
            self._event_writer.logged = await with_retries(
                lambda: self._services.store.events.logged(lease.id), "reading the size of the log"
            )
        if not lease.adopted:
            return await self._prepare() or await self._start()
        while True:
            begun = await self._find() or await self._prepare() or await self._start()
            # An attempt that ends here unstarted must not be started later by a slow previous owner.
            if not isinstance(begun, AttemptEnd) or self._over:
                return begun
            if not await until_trusted(self._held):  # Another worker owns it now.
                raise LeaseLost
            if await self._runner.forbid(self._identity, lease.domain):
                return begun
            await self._wait(jitter(QUICK))

    async def _find(self) -> AttemptHandle | AttemptEnd | None:
        """Look for an attempt that another worker began. None: nothing ran, and we may start it."""
        state, running = await self._find_begun()
        if running is not None:
            return running
        self._over = True
        if state == "forbidden":
            return AttemptEnd(cause=Cause.DRAINED)
        if self._lease.adoption.phase is Phase.STARTED or self._lease.domain != self._runner.domain:
            return self._nothing_left()
        self._over = False
        self._link.adopted.clear()  # A supervisor of the previous owner may still start before ours.
        return None

    async def _find_begun(self) -> tuple[AttemptState, AttemptHandle | None]:
        """Look for the attempt, and adopt it if it has begun."""
        adoption = self._lease.adoption
        state, running = await self._runner.find(
            self._identity, self._lease.domain, stdout=adoption.stdout_offset, stderr=adoption.stderr_offset
        )
        if state in ("missing", "forbidden"):
            running.close()
            return state, None
        if self._pipeline is not None:
            await self._pipeline.adopt(running)
        await self._take_over(running, running_now=state == "running")
        return state, running

    def _nothing_left(self) -> AttemptEnd:
        message = "the attempt was not found where it ran"
        return self._unless_stopped(AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message=message)))

    async def _take_over(self, running: AttemptHandle, *, running_now: bool) -> None:
        """Send our token to the supervisor, which refuses commands of the previous owner from then on."""
        self._at("found")
        if running_now:
            self._link.adopted.clear()
            await self._link.take_control_if_adopting(running)
            if self._policy.stop_after is not None:
                self._link.renew_stop_after(running, self._held.renewed_at)

    async def _prepare(self) -> AttemptEnd | None:
        """Check before the start: no stop request, a valid spec, and readiness. Return an End if it must not start."""
        self._held.receive_stop(await self._services.stops.ask(self._lease))
        if self._held.stop is None:
            try:
                check_spec(self._lease.runner, self._lease.spec)
            except Invalid as error:
                return AttemptEnd(
                    cause=Cause.START_FAILED, error=Error(code="contract_violation", message=error.message)
                )
        if self._held.stop is None and (self._lease.lane is not None or self._policy.check is not None):
            try:
                await make_ready(self._services, self._held, until=self._stopped_or_draining)
            except CannotStart as error:
                return AttemptEnd(cause=Cause.START_FAILED, error=error.error)
            except NotReady as error:
                return AttemptEnd(cause=Cause.INTERRUPTED, error=Error(code="not_ready", message=str(error)))
        end = None
        if self._held.stop is None and self._pipeline is not None:
            end = await self._pipeline.begin()
        if (unwanted := self._unwanted()) is not None:
            return unwanted
        self._at("prepared")
        return end

    def _unwanted(self) -> AttemptEnd | None:
        """Return how the attempt ends if it must not be started any more."""
        self._check_lease()
        if self._services.draining.is_set():
            raise HandOverRequested
        return None if self._held.stop is None else AttemptEnd(cause=_cause(self._held.stop))

    def _stopped_or_draining(self) -> bool:
        return self._held.lost or self._held.stop is not None or self._services.draining.is_set()

    async def _start(self) -> AttemptHandle | AttemptEnd:
        """Start the attempt. Retry a start that misses its deadline, with backoff: host or engine are overloaded."""
        lease = self._lease
        for late in range(1, LATE_STARTS + 1):
            try:
                async with self._runner.start_slot():
                    began = boottime()
                    if (unwanted := self._unwanted()) is not None:
                        return unwanted
                    running = await self._runner.start(await self._start_request(), self._confirm)
                self._at("spawned")
                return running
            except TooLate:
                took = boottime() - began
                log.warning(
                    "job %s attempt %d: start %d missed its deadline (%.1f s)", lease.id, lease.attempt, late, took
                )
                if late < LATE_STARTS:  # Spread starts that were late together.
                    await self._wait(jitter(backoff(late, base=max(QUICK, took), cap=LATE_SECONDS), 0.9))
            except CannotStart as error:
                return AttemptEnd(cause=Cause.START_FAILED, error=error.error)
        message = f"{LATE_STARTS} starts took longer than the lease allows; the host or engine is overloaded"
        return AttemptEnd(cause=Cause.START_FAILED, error=Error(code="start_failed", message=message))

    async def _start_request(self) -> StartRequest:
        """Build the request for the runner. Its start deadline is the time until which the lease is trusted."""
        lease, policy = self._lease, self._policy
        if not await until_trusted(self._held):
            raise LeaseLost
        least = 2 * self._services.settings.heartbeat_interval
        if policy.stop_after is not None and policy.stop_after < least:
            message = f"stop_after is {policy.stop_after:g} s; here it must be at least {least:g} s: two heartbeats"
            raise CannotStart("contract_violation", message)
        secrets = find_secrets(policy.secrets, self._services.settings.secrets_dir)
        files = await asyncio.to_thread(self._files) if policy.uploads else {}
        return StartRequest(
            identity=self._identity,
            domain=lease.domain,
            token=lease.token,
            spec=lease.spec,
            inputs=lease.inputs,
            start_by=self._held.trusted_until,
            timeout=policy.timeout or self._services.settings.timeout,
            idle_timeout=policy.idle_timeout,
            stop_grace=policy.stop_grace,
            stop_after=None if policy.stop_after is None else self._held.renewed_at + policy.stop_after,
            secrets=secrets,
            files=files,
            pipeline=None if self._pipeline is None else self._pipeline.staged(),
        )

    def _files(self) -> Mapping[str, Path]:
        try:
            return self._services.inputs.given(self._lease.id, self._policy.uploads)
        except NotFound as error:
            self._check_shared_folder()
            message = f"an upload of this job is not in the shared folder of this worker: {error}"
            raise CannotStart("start_failed", message) from error

    def _check_shared_folder(self) -> None:
        """Raise EngineUnreachable if this host's shared folder is away: the job may run on another host."""
        try:
            self._services.shared.check()
        except SharedFolderAway as error:
            raise EngineUnreachable(error.message) from error

    async def _confirm(self) -> None:
        """Check in the record that the lease is still ours, just before a start that has no check of its own."""
        self._at("created")
        if not await until_trusted(self._held):
            raise LeaseLost
        store, lease = self._services.store, self._lease
        if not await with_retries(lambda: store.leases.holds(self._services.worker, lease), "checking the lease"):
            raise LeaseLost
        self._at("confirmed")

    # Wait

    async def _supervise(self, running: AttemptHandle) -> LogReader:
        """Ship the output and carry out stop requests until the attempt ends, then ship the rest of the log."""
        cap = self._services.settings.log_max_bytes
        names = () if self._pipeline is None else self._pipeline.names
        own = None if self._pipeline is None else self._pipeline.own_line
        log_reader = LogReader(
            running,
            self._event_writer,
            cap=cap,
            on_event=self._on_event,
            mask=self._mask,
            tasks=names,
            own_line=own,
            short_of_room=self._short_of_room,
        )
        running.watch(self._changed.set)
        async with self._driven(running), self._watched(running):
            await self._attend(running, log_reader)
        self._check_lease()
        await self._ship_rest(log_reader)
        await self._link.record_stop_phases()
        if self._pipeline is not None:
            await self._pipeline.settle()
        return log_reader

    async def _attend(self, running: AttemptHandle, log_reader: LogReader) -> None:
        quiet = 0
        while not running.over:
            self._check_lease()
            if self._services.draining.is_set():
                await log_reader.ship()
                raise HandOverRequested
            await self._link.take_control_if_adopting(running)
            await self._link.stop_if_asked(
                running, over_budget=self._over_budget is not None, over_limit=self._over_limit
            )
            await self._wait(0.0 if log_reader.more and not self._short_of_room() else self._pace(quiet))
            before = self._event_writer.committed
            await self._ship(log_reader)
            quiet = quiet + 1 if self._event_writer.committed == before else 0

    def _short_of_room(self) -> bool:
        return DATABASE in self._services.disks.low

    def _pace(self, quiet: int) -> float:
        if self._short_of_room():
            return SCARCE
        if self._pipeline is not None:
            return self._pipeline.pace
        return SLOW if quiet > 8 else QUICK

    @contextlib.asynccontextmanager
    async def _driven(self, running: AttemptHandle) -> AsyncIterator[None]:
        """Drive a pipeline during the block. An error in the pipeline cancels the block and is raised here."""
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

    @contextlib.asynccontextmanager
    async def _watched(self, running: AttemptHandle) -> AsyncIterator[None]:
        """Watch the size of the attempt's folder during the block."""

        def over(error: Error) -> None:
            self._over_limit = error
            self._changed.set()

        watching = asyncio.create_task(watch_folder(running, self._limits, over))
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _drive(self, pipeline: PipelineExecution, running: AttemptHandle) -> None:
        """Drive the pipeline once the supervisor obeys only us: until then its progress may still change."""
        await self._link.adopted.wait()
        await pipeline.drive(running)

    async def _ship_rest(self, log_reader: LogReader) -> None:
        """Ship to the end of the log, waiting for the engine if it is unreachable."""
        n = 0
        while True:
            try:
                if not await log_reader.ship_rest():
                    raise LeaseLost
                return
            except EngineUnreachable:
                n += 1
                await self._wait_for_engine(n)

    async def _wait_for_engine(self, n: int) -> None:
        """Wait before asking an unreachable engine again: only it knows how the attempt ended."""
        self._check_lease()
        if self._services.draining.is_set():
            raise HandOverRequested
        await self._wait(jitter(backoff(n, base=0.1, cap=5.0)))

    async def _wait(self, seconds: float) -> None:
        """Wait for a change (end, lease, stop request, drain), at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def _ship(self, log_reader: LogReader) -> None:
        if not await log_reader.ship():
            raise LeaseLost
        self._at("shipped")
        await self._link.record_stop_phases()
        self._over_budget = self._over_budget or self._event_writer.over_budget(self._policy.budget)

    def _on_event(self, event: dict[str, Any]) -> None:
        """Process an event of the supervisor."""
        self._link.on_event(event)
        if self._pipeline is not None:
            self._pipeline.progress.on_event(event)

    def _renew_stop_after(self, requested: float) -> None:
        if self._running is not None:
            self._link.renew_stop_after(self._running, requested)

    # Collect, finish

    async def _collect(self, running: AttemptHandle) -> AttemptEnd:
        """Find out how the attempt ended. If processes could not be killed, record that and wait."""
        n = 0
        end: AttemptEnd | None = None
        while await until_trusted(self._held):
            n += 1
            try:
                if (end := await running.collect()) is not None:
                    break
            except EngineUnreachable:
                await self._wait_for_engine(n)
                continue
            if self._services.draining.is_set():
                raise HandOverRequested
            await self._link.record_stop_phase(StopPhase.NOT_DEAD)
            await self._wait(jitter(backoff(n, base=0.2, cap=30.0)))
        if end is None:
            raise LeaseLost
        self._at("collected")
        end = await self._meant(end)
        collect = running.outputs if self._pipeline is None else self._pipeline.collector(running, end)
        end = await self._with_outputs_at_last(collect, end)
        if self._held.stop is not None:
            await self._link.record_stop_phase(StopPhase.DEAD)
        return end

    async def _with_known_outputs(self, end: AttemptEnd) -> AttemptEnd | None:
        """Collect the cached outputs of a pipeline that needs no start. None: they are gone, plan again."""
        if self._pipeline is None or end.cause is not Cause.EXIT:
            return end
        try:
            self._mask = Mask(find_secrets(self._policy.secrets, self._services.settings.secrets_dir).values())
            return await self._with_outputs_at_last(self._pipeline.outputs.collect_cached, end)
        except CannotStart as error:
            return AttemptEnd(cause=Cause.START_FAILED, error=error.error)
        except SnapshotFailed as error:
            return AttemptEnd(cause=Cause.START_FAILED, error=Error(code=error.code, message=str(error)))
        except SnapshotDamaged as error:
            log.warning(
                "job %s attempt %d: cached outputs are gone, planning again: %s",
                self._lease.id,
                self._lease.attempt,
                error,
            )
            return None

    async def _with_outputs_at_last(self, collect: CollectOutputs, end: AttemptEnd) -> AttemptEnd:
        """Collect the outputs, retrying while storage is unavailable: there is no other copy of them."""
        n = 0
        give_up_at = boottime() + self._services.settings.outputs_timeout
        while True:
            try:
                return await collect_outputs(self._services, self._lease, collect, end, self._mask, self._event_writer)
            except (OutputsNotStored, EngineUnreachable) as error:
                n += 1
                log.warning("job %s attempt %d: %s", self._lease.id, self._lease.attempt, error)
                waits = isinstance(error, OutputsNotStored)
                if self._held.stop is not None and n >= STOPPED_TRIES and waits:
                    return AttemptEnd(cause=_cause(self._held.stop), exit_code=end.exit_code, signal=end.signal)
                if waits and boottime() >= give_up_at:
                    return self._without_outputs(end, str(error))
                await self._wait_for_engine(n)

    def _without_outputs(self, end: AttemptEnd, why: str) -> AttemptEnd:
        """Return the end of an attempt whose outputs could not be stored in time: a success becomes a failure."""
        if end.cause is not Cause.EXIT or end.exit_code not in (0, None) or end.error is not None:
            return end
        message = (
            f"it ended well, but its output could not be stored within {self._services.settings.outputs_timeout:g} s "
            f"(HOLDFAST_OUTPUTS_TIMEOUT): {why}; make room in the shared folder, then run it again"
        )
        error = Error(code=OUTPUTS_NOT_STORED, message=message)
        return msgspec.structs.replace(end, error=error, result=None)

    async def _explained(self, end: AttemptEnd, heard: LastError) -> AttemptEnd:
        """Add the task that failed, and the last line on stderr, which a previous owner may have shipped."""
        if end.error is not None or end.cause not in ITS_OWN or (end.cause is Cause.EXIT and end.exit_code == 0):
            return end
        task = None if self._pipeline is None else self._pipeline.progress.failed
        last = heard.line(task)
        if last is None and self._lease.adopted:
            shipped = LastError()
            shipped.add_events(await recent_events(self._services.store, self._lease))
            last = shipped.line(task)
        end = msgspec.structs.replace(end, task=task, last_error=last)
        return msgspec.structs.replace(end, error=broken_limit(end, self._limits))

    async def _meant(self, end: AttemptEnd) -> AttemptEnd:
        """Attribute an end by signal to its reason: a stop request, the budget, or a loss."""
        if end.cause in (Cause.CANCELLED, Cause.INTERRUPTED) and self._held.stop is None:
            self._held.receive_stop(await self._services.stops.ask(self._lease))
            if self._held.stop is None:
                over = self._over_budget or self._event_writer.over_budget(self._policy.budget)
                if over is not None:
                    error = Error(code=EXCEEDED, message=over)
                    return AttemptEnd(cause=end.cause, exit_code=end.exit_code, signal=end.signal, error=error)
                message = "the attempt was stopped without a stop request for this job"
                return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message=message))
        return self._unless_stopped(end)

    def _unless_stopped(self, end: AttemptEnd) -> AttemptEnd:
        """Let a stop request decide the end of an attempt that it stopped, or that was already dead."""
        stop = self._held.stop
        if stop is None or end.cause not in (Cause.CANCELLED, Cause.INTERRUPTED, Cause.LOST):
            return end
        return AttemptEnd(cause=_cause(stop), exit_code=end.exit_code, signal=end.signal)

    async def _finish(self, outcome: Outcome) -> Status | None:
        self._check_lease()
        self._held.finishing = True
        return await self._services.finishes.ask((self._lease, outcome))

    async def _drop_outputs(self) -> None:
        """Remove the outputs of an attempt that is not in the record: its job has moved on or was deleted."""
        lease = self._lease
        ours = (lease.id, lease.attempt, lease.token)
        try:
            if ours not in await self._services.store.attempts.standing([lease.id]):
                await asyncio.to_thread(self._services.artifacts.remove, lease.id, f"{lease.attempt}.{lease.token}")
        except StoreError as error:
            log.info("job %s attempt %d: its outputs are left to the sweep: %s", lease.id, lease.attempt, error)

    def _check_lease(self) -> None:
        if self._held.lost:
            raise LeaseLost

    def _at(self, step: str) -> None:
        self._services.at(step, self._lease)

    @property
    def _identity(self) -> Identity:
        return Identity(self._services.installation, self._lease.id, self._lease.attempt)


def _cause(stop: StopRequest) -> Cause:
    return Cause.INTERRUPTED if stop.kind is StopKind.INTERRUPT else Cause.CANCELLED
