"""One attempt under a supervisor, from its claim or adoption to its end: prepare → start or adopt → attend → collect →
classify → finish, each a small step. The first two are in `attempt_start.py`; what differs between a plain command and
a pipeline is in its strategy (`attempt_strategy.py`).

If this worker dies at any step, the next one finds the attempt by its identity and continues there. A lost lease ends
the execution immediately: nothing is written or changed after that.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec

from holdfast.errors import SnapshotDamaged, SnapshotFailed
from holdfast.limits import AttemptLimits
from holdfast.model import FUNCTION_DOMAIN, Cause, Error, Outcome, Phase, Status, StopPhase
from holdfast.runner.base import AttemptEnd, AttemptHandle, CannotStart, EngineUnreachable, Runner
from holdfast.runner.disk import DATABASE
from holdfast.runner.secrets import NO_MASK, Mask
from holdfast.timing import backoff, jitter
from holdfast.worker.attempt_changes import AttemptChanges
from holdfast.worker.attempt_start import AttemptStarter
from holdfast.worker.attempt_strategy import QUICK, AttemptStrategy, PlainCommand
from holdfast.worker.batch_writer import HandOverRequest
from holdfast.worker.classify import classify
from holdfast.worker.end_reason import EndReason
from holdfast.worker.event_writer import EventWriter
from holdfast.worker.execution_services import ExecutionServices, HandOverRequested
from holdfast.worker.held_leases import HeldLease, LeaseLost, boottime, require_trust
from holdfast.worker.limit_checks import watch_folder
from holdfast.worker.log_reader import LogReader
from holdfast.worker.output_collector import OutputCollector
from holdfast.worker.pipeline_execution import PipelineExecution
from holdfast.worker.stop_sequence import StopReason, budget_error
from holdfast.worker.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)

SCARCE = 5.0
"""Seconds between reads of the output while the disk of the database is below its reserve."""
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
        self._event_writer = EventWriter(services.store, held.lease, log_max_bytes=services.settings.log_max_bytes)
        self._changes = AttemptChanges(services, held)
        self._link = SupervisorLink(services, held)
        self._strategy = self._strategy_of_the_job()
        self._outputs = OutputCollector(services, held, self._event_writer, self._changes)
        self._reason = EndReason(services, held, self._event_writer)
        self._running: AttemptHandle | None = None
        self._limits = AttemptLimits()
        self._mask = NO_MASK
        self._ended = False
        self._outlives_worker = held.lease.domain != FUNCTION_DOMAIN
        self._leave_at: float | None = None
        self._starter = AttemptStarter(
            services,
            runner,
            held,
            event_writer=self._event_writer,
            link=self._link,
            strategy=self._strategy,
            changes=self._changes,
        )

    def _strategy_of_the_job(self) -> AttemptStrategy:
        if "tasks" in self._lease.spec:
            return PipelineExecution(self._services, self._runner, self._held, self._link, self._changes)
        return PlainCommand()

    async def run(self) -> Status | None:
        """Carry the attempt to its end. Return the job's new status, or None if the lease is no longer ours."""
        lease = self._lease
        self._held.on_change = self._changes.notify
        if (stop := lease.adoption.stop_request) is not None:
            self._held.stop = stop
            self._link.stop.continue_from(stop)
        try:
            self._at("claimed")
            outcome = classify(await self._execute_or_drain(), lease)
            self._at("classified")
            return await self._finish(outcome)
        except LeaseLost:
            log.info("job %s attempt %d: lease lost; the execution stops without writing", lease.id, lease.attempt)
        except HandOverRequested:
            await self._services.hand_overs.ask(HandOverRequest(lease))
        except EngineUnreachable as error:
            log.warning("job %s attempt %d: cannot continue here, handing over: %s", lease.id, lease.attempt, error)
            self._runner.note_failure()
            away = HandOverRequest(lease, delay=jitter(AWAY_SECONDS), reason="engine_unreachable")
            await self._services.hand_overs.ask(away)
        finally:
            if self._running is not None:
                self._running.close()
        return None

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
            await self._changes.wait(QUICK)
        return AttemptEnd(cause=Cause.DRAINED)

    async def _execute(self) -> AttemptEnd:
        begun = await self._begin()
        if isinstance(begun, AttemptEnd):
            return begun
        self._running = running = begun
        await self._read_facts(running)
        await self._record_start()
        self._at("started")
        log_reader = await self._supervise(running)
        self._at("exited")
        end = await self._await_end(running)
        self._at("collected")
        end = await self._collect(running, await self._reason.of_a_stop(end))
        if end.output_bytes is not None and not await log_reader.note_missing(end.output_bytes):
            raise LeaseLost
        end = await self._reason.of_a_failure(
            end, task=self._strategy.failed_task, stderr=log_reader.last_error, limits=self._limits
        )
        return msgspec.structs.replace(end, error=self._mask.error(end.error)) if self._mask else end

    # Begin

    async def _begin(self) -> AttemptHandle | AttemptEnd:
        """Start or adopt the attempt. Return its end, with the cached outputs, if there is nothing to start."""
        while True:
            begun = await self._starter.begin()
            if not isinstance(begun, AttemptEnd):
                return begun
            if (end := await self._with_cached_outputs(begun)) is not None:
                return end

    async def _with_cached_outputs(self, end: AttemptEnd) -> AttemptEnd | None:
        """Collect the cached outputs of an attempt that needs no start. None: they are gone, prepare it again."""
        if end.cause is not Cause.EXIT or (collect := self._strategy.cached_outputs()) is None:
            return end
        try:
            self._mask = Mask(self._services.secrets(self._policy).values())
            return await self._outputs.collect(collect, end, self._mask)
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

    async def _read_facts(self, running: AttemptHandle) -> None:
        """Read what was fixed when the attempt started: an adopter uses the same limits and masks the same secrets."""
        self._limits = await running.limits()
        if self._policy.secrets:
            self._mask = Mask(await running.secrets())
        self._strategy.mask = self._mask
        if self._policy.stop_after is not None:
            self._held.on_renewed = partial(self._link.renew_stop_after, running)

    async def _record_start(self) -> None:
        if self._lease.adoption.phase is Phase.CLAIMED and not await self._services.starts.ask(self._lease):
            raise LeaseLost

    # Attend

    async def _supervise(self, running: AttemptHandle) -> LogReader:
        """Ship the output and carry out stop requests until the attempt ends, then ship the rest of the log."""
        log_reader = LogReader(
            running,
            self._event_writer,
            events_cap=self._services.settings.log_max_bytes,
            on_event=self._on_event,
            mask=self._mask,
            tasks=self._strategy.task_names,
            own_line=self._strategy.own_line,
            short_of_room=self._short_of_room,
        )
        running.watch(self._changes.notify)
        async with self._driven(running):
            await self._attend(running, log_reader)
        self._held.check()
        await self._ship_rest(log_reader)
        await self._link.record_stop_phases()
        await self._strategy.settle()
        return log_reader

    @contextlib.asynccontextmanager
    async def _driven(self, running: AttemptHandle) -> AsyncIterator[None]:
        """Drive the attempt and watch its folder during the block. An error of theirs cancels it and is raised here."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._drive(running)),
                    group.create_task(watch_folder(running, self._limits, self._on_limit)),
                ]
                yield
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _drive(self, running: AttemptHandle) -> None:
        """Drive once the supervisor obeys only us: until then the progress of a pipeline may still change."""
        await self._link.adopted.wait()
        await self._strategy.drive(running)

    async def _attend(self, running: AttemptHandle, log_reader: LogReader) -> None:
        quiet = 0
        while not running.over:
            self._held.check()
            if self._services.draining.is_set() and self._must_leave():
                await log_reader.ship()
                raise HandOverRequested
            await self._link.take_control_if_adopting(running)
            await self._link.stop_if_asked(running)
            await self._changes.wait(self._pace(log_reader, quiet))
            before = self._event_writer.committed
            await self._ship(log_reader)
            quiet = quiet + 1 if self._event_writer.committed == before else 0

    def _must_leave(self) -> bool:
        """Return whether a draining worker leaves the attempt: one that dies with it gets the grace of functions."""
        if self._leave_at is None:
            self._leave_at = boottime() + (0.0 if self._outlives_worker else self._services.settings.drain_grace)
        return boottime() >= self._leave_at

    def _pace(self, log_reader: LogReader, quiet: int) -> float:
        if self._short_of_room():
            return SCARCE
        return 0.0 if log_reader.more else self._strategy.pace(quiet)

    def _short_of_room(self) -> bool:
        return DATABASE in self._services.disks.low

    async def _ship(self, log_reader: LogReader) -> None:
        if not await log_reader.ship():
            raise LeaseLost
        self._at("shipped")
        await self._link.record_stop_phases()
        if (over := self._event_writer.over_budget(self._policy.budget)) is not None:
            self._link.stop.ask(StopReason.BUDGET, budget_error(over))

    async def _ship_rest(self, log_reader: LogReader) -> None:
        """Ship to the end of the log, waiting for the engine if it is unreachable: only it has the log."""
        for n in itertools.count(1):
            try:
                if not await log_reader.ship_rest():
                    raise LeaseLost
                return
            except EngineUnreachable:
                await self._changes.wait_for_engine(n)

    def _on_event(self, event: dict[str, Any]) -> None:
        """Process an event of the supervisor."""
        self._link.on_event(event)
        self._strategy.on_event(event)

    def _on_limit(self, error: Error) -> None:
        self._link.stop.ask(StopReason.LIMIT, error)
        self._changes.notify()

    # Collect, finish

    async def _await_end(self, running: AttemptHandle) -> AttemptEnd:
        """Find out how the attempt ended. If processes could not be killed, record that and wait."""
        n = 0
        while True:
            n += 1
            await require_trust(self._held)
            try:
                if (end := await running.collect()) is not None:
                    return end
            except EngineUnreachable:
                await self._changes.wait_for_engine(n)
                continue
            if self._services.draining.is_set():
                raise HandOverRequested
            await self._link.record_stop_phase(StopPhase.NOT_DEAD)
            await self._changes.wait(jitter(backoff(n, base=0.2, cap=30.0)))

    async def _collect(self, running: AttemptHandle, end: AttemptEnd) -> AttemptEnd:
        end = await self._outputs.collect(self._strategy.collector(running, end), end, self._mask)
        if self._held.stop is not None:
            await self._link.record_stop_phase(StopPhase.DEAD)
        return end

    async def _finish(self, outcome: Outcome) -> Status | None:
        """Record the end. If the record has moved on without us, remove the outputs that it does not know."""
        self._held.check()
        self._held.finishing = True
        status = await self._services.finishes.ask((self._lease, outcome))
        self._ended = status is not None
        if status is None:
            await self._outputs.drop()
        self._at("finished")
        return status

    def _at(self, step: str) -> None:
        self._services.at(step, self._lease)
