"""One attempt under a supervisor, from its claim or adoption to its end: prepare → start or adopt → wait → collect →
classify → finish, each a small step. The first two are in `attempt_start.py`.

If this worker dies at any step, the next one finds the attempt by its identity and continues there. A lost lease ends
the execution immediately: nothing is written or changed after that.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from holdfast.budgets import EXCEEDED
from holdfast.errors import SnapshotDamaged, SnapshotFailed, StoreError
from holdfast.limits import AttemptLimits
from holdfast.model import FUNCTION_DOMAIN, Cause, Error, Outcome, Phase, Status, StopPhase
from holdfast.runner.artifacts import outputs_name
from holdfast.runner.base import AttemptEnd, AttemptHandle, CannotStart, EngineUnreachable, Runner
from holdfast.runner.disk import DATABASE
from holdfast.runner.secrets import NO_MASK, Mask, find_secrets
from holdfast.timing import backoff, jitter
from holdfast.worker.attempt_start import AttemptStarter
from holdfast.worker.batch_writer import HandOverRequest
from holdfast.worker.classify import OUTPUTS_NOT_STORED, classify, stop_cause, unless_stopped
from holdfast.worker.collect import CollectOutputs, OutputsNotStored, collect_outputs
from holdfast.worker.event_writer import EventWriter
from holdfast.worker.execution_services import ExecutionServices, HandOverRequested
from holdfast.worker.held_leases import HeldLease, LeaseLost, boottime, until_trusted
from holdfast.worker.last_error import LastError
from holdfast.worker.limit_checks import broken_limit, watch_folder
from holdfast.worker.log_reader import LogReader
from holdfast.worker.pipeline_execution import PipelineExecution
from holdfast.worker.recent_events import recent_events
from holdfast.worker.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)

QUICK, SLOW, SCARCE = 0.25, 1.0, 5.0
"""Seconds between reads of the output: while there is some, when it has been quiet for a while, and while the disk of
the database is below its reserve."""
STOPPED_TRIES = 3
"""How often we try to store the outputs of a job that has a stop request: it need not wait for disk space."""
ITS_OWN = (Cause.EXIT, Cause.OUT_OF_MEMORY, Cause.TIMED_OUT, Cause.IDLE_TIMEOUT)
"""Causes that are due to the command itself, not to a request or a loss."""
AWAY_SECONDS = 5.0
"""Delay before an attempt can be adopted after its engine was unreachable."""


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
        self._over_budget: str | None = None
        self._over_limit: Error | None = None
        self._limits = AttemptLimits()
        self._mask = NO_MASK
        self._ended = False
        self._outlives_worker = held.lease.domain != FUNCTION_DOMAIN
        self._leave_at: float | None = None
        self._pipeline: PipelineExecution | None = None
        if "tasks" in self._lease.spec:
            self._pipeline = PipelineExecution(services, runner, held, self._stopped_or_draining)
        self._starter = AttemptStarter(
            services,
            runner,
            held,
            event_writer=self._event_writer,
            link=self._link,
            pipeline=self._pipeline,
            interrupted=self._stopped_or_draining,
            wait=self._wait,
        )

    async def run(self) -> Status | None:
        """Carry the attempt to its end. Return the job's new status, or None if the lease is no longer ours."""
        lease = self._lease
        self._held.on_change = self._changed.set
        if (stop := lease.adoption.stop_request) is not None:
            self._held.stop = stop
            self._link.recorded_phase = stop.phase
        try:
            self._at("claimed")
            end = await self._execute_or_drain()
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
        if self._ended and (self._running is not None or self._starter.without_space):
            try:
                if self._running is not None:
                    await self._running.remove(had_other_owners=self._lease.adopted)
                else:
                    await self._starter.sweep()
                self._at("removed")
            except Exception as error:
                log.warning(
                    "job %s attempt %d: clean-up left to the sweep: %s", self._lease.id, self._lease.attempt, error
                )

    async def _execute_or_drain(self) -> AttemptEnd:
        """Carry the attempt to its end. One that cannot be handed over is stopped when this worker leaves."""
        try:
            return await self._execute()
        except HandOverRequested:
            if self._outlives_worker:
                raise
        while not await self._starter.sweep():
            self._held.check()
            await self._wait(QUICK)
        return AttemptEnd(cause=Cause.DRAINED)

    async def _execute(self) -> AttemptEnd:
        begun = await self._starter.begin()
        while isinstance(begun, AttemptEnd):
            if (end := await self._with_known_outputs(begun)) is not None:
                return end
            begun = await self._starter.begin()
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
        self._held.check()
        await self._ship_rest(log_reader)
        await self._link.record_stop_phases()
        if self._pipeline is not None:
            await self._pipeline.settle()
        return log_reader

    async def _attend(self, running: AttemptHandle, log_reader: LogReader) -> None:
        quiet = 0
        while not running.over:
            self._held.check()
            if self._services.draining.is_set() and self._must_leave():
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

    def _must_leave(self) -> bool:
        """Return whether a draining worker leaves the attempt: one that dies with it gets the grace of functions."""
        if self._leave_at is None:
            self._leave_at = boottime() + (0.0 if self._outlives_worker else self._services.settings.drain_grace)
        return boottime() >= self._leave_at

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
        self._held.check()
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
                log.warning(
                    "job %s attempt %d: retrying to store its outputs: %s", self._lease.id, self._lease.attempt, error
                )
                waits = isinstance(error, OutputsNotStored)
                if self._held.stop is not None and n >= STOPPED_TRIES and waits:
                    return AttemptEnd(cause=stop_cause(self._held.stop), exit_code=end.exit_code, signal=end.signal)
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

    async def _explained(self, end: AttemptEnd, stderr: LastError) -> AttemptEnd:
        """Add the task that failed, and the last line on stderr, which a previous owner may have shipped."""
        if end.error is not None or end.cause not in ITS_OWN or (end.cause is Cause.EXIT and end.exit_code == 0):
            return end
        task = None if self._pipeline is None else self._pipeline.progress.failed
        last = stderr.line(task)
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
        return unless_stopped(self._held.stop, end)

    async def _finish(self, outcome: Outcome) -> Status | None:
        self._held.check()
        self._held.finishing = True
        return await self._services.finishes.ask((self._lease, outcome))

    async def _drop_outputs(self) -> None:
        """Remove the outputs of an attempt that is not in the record: its job has moved on or was deleted."""
        lease = self._lease
        ours = (lease.id, lease.attempt, lease.token)
        try:
            if ours not in await self._services.store.attempts.tokens([lease.id]):
                name = outputs_name(lease.attempt, lease.token)
                await asyncio.to_thread(self._services.artifacts.remove, lease.id, name)
        except StoreError as error:
            log.info("job %s attempt %d: its outputs are left to the sweep: %s", lease.id, lease.attempt, error)

    def _stopped_or_draining(self) -> bool:
        return self._held.lost or self._held.stop is not None or self._services.draining.is_set()

    def _at(self, step: str) -> None:
        self._services.at(step, self._lease)
