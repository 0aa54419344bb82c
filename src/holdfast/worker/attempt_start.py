"""Begins an attempt: finds it if another worker began it, otherwise prepares and starts it.

The result is a handle of an attempt that runs or ran, or the end of an attempt that must not or cannot run. In the
second case no slow previous owner can start it later.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from holdfast.errors import Invalid, NotFound, StorageUnavailable, StoreError
from holdfast.model import Cause, Error, Phase
from holdfast.runner.artifacts import InputFile
from holdfast.runner.attempt_folder import FULL
from holdfast.runner.base import (
    AttemptEnd,
    AttemptHandle,
    AttemptState,
    CannotStart,
    EngineUnreachable,
    Identity,
    NoSpace,
    Runner,
    StartRequest,
    StartTooLate,
)
from holdfast.runner.process_staging import EXHAUSTED
from holdfast.runner.secrets import NO_MASK, Mask
from holdfast.runner.uploads import input_files
from holdfast.runner_specs import check_spec
from holdfast.timing import backoff, jitter
from holdfast.worker.attempt_changes import AttemptChanges
from holdfast.worker.attempt_strategy import AttemptStrategy
from holdfast.worker.batch_writer import with_retries
from holdfast.worker.classify import DISK_FULL, stop_cause, unless_stopped
from holdfast.worker.event_writer import EventWriter
from holdfast.worker.execution_services import ExecutionServices, HandOverRequested
from holdfast.worker.held_leases import HeldLease, LeaseLost, boottime, require_trust
from holdfast.worker.readiness import CheckTimedOut, make_ready
from holdfast.worker.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.25
"""Delay before the next try to prevent a start, and the shortest backoff between late starts."""
LATE_STARTS, LATE_SECONDS = 5, 30.0
"""How many starts may miss the deadline of the lease, and the longest backoff between them."""
MAX_MESSAGE = 1000
"""Characters kept of the message of an unexpected error."""


class AttemptStarter:
    """Begins one attempt."""

    def __init__(
        self,
        services: ExecutionServices,
        runner: Runner,
        held: HeldLease,
        *,
        event_writer: EventWriter,
        link: SupervisorLink,
        strategy: AttemptStrategy,
        changes: AttemptChanges,
    ) -> None:
        self._services = services
        self._runner = runner
        self._held = held
        self._lease = held.lease
        self._policy = held.lease.policy
        self._event_writer = event_writer
        self._link = link
        self._strategy = strategy
        self._changes = changes
        self._over = False
        """Whether it is certain that the attempt cannot start any more."""
        self.without_space = False
        """Whether the attempt ends unstarted because the disk is full."""

    async def begin(self) -> AttemptHandle | AttemptEnd:
        """Begin. An unexpected error fails the attempt with its message: another worker would hit it too."""
        try:
            return await self._begin_once()
        except (LeaseLost, HandOverRequested, EngineUnreachable, StoreError, MemoryError):
            raise
        except StorageUnavailable as error:  # The job may run on another host.
            raise EngineUnreachable(error.message) from error
        except Exception as error:
            if isinstance(error, NoSpace) or (isinstance(error, OSError) and error.errno in FULL):
                return await self._no_space(error)
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                raise EngineUnreachable(f"this host is exhausted: {error.strerror}") from error
            return await self._not_begun(error)

    async def sweep(self) -> bool:
        """Remove the remains of an attempt that must not run, stopping it first. Return whether it is gone."""
        return await self._runner.sweep(self._identity)

    async def _no_space(self, error: Exception) -> AttemptHandle | AttemptEnd:
        """Requeue a job whose start found the disk full: nothing ran. If the attempt does run, adopt it.

        No start marker is needed if no other worker had the attempt and its runner says that it does not run.
        """
        lease = self._lease
        log.warning("job %s attempt %d: not started, as the disk is full: %s", lease.id, lease.attempt, error)
        self._runner.pause(f"the disk was full at a start: {error}")
        await require_trust(self._held)
        if (running := (await self._find_begun())[1]) is not None:
            return running
        sure = isinstance(error, NoSpace) and not lease.adopted
        if not sure and not await self._runner.forbid(self._identity, lease.domain):
            raise EngineUnreachable("the attempt was started by a previous owner") from error
        self._over = self.without_space = True
        self._at("no space")
        return AttemptEnd(cause=Cause.DRAINED, error=Error(code=DISK_FULL, message=str(error)[:MAX_MESSAGE]))

    async def _not_begun(self, error: Exception) -> AttemptHandle | AttemptEnd:
        """Fail an attempt that does not run, and make sure that it never will; if it does run, adopt it."""
        lease = self._lease
        log.error(
            "job %s attempt %d: unexpected error while starting; failing it unless it runs",
            lease.id,
            lease.attempt,
            exc_info=error,
        )
        await require_trust(self._held)
        if (running := (await self._find_begun())[1]) is not None:
            return running
        if not await self._runner.forbid(self._identity, lease.domain):
            raise error
        self._over = True
        mask = NO_MASK
        with contextlib.suppress(Exception):
            mask = Mask(self._services.secrets(self._policy).values())
        message = mask.text(f"it could not be started: {type(error).__name__}: {error}")[:MAX_MESSAGE]
        return AttemptEnd(cause=Cause.START_FAILED, error=Error(code="start_failed", message=message))

    async def _begin_once(self) -> AttemptHandle | AttemptEnd:
        """Find the attempt if it runs or ran; otherwise start it."""
        lease = self._lease
        await self._event_writer.continue_log()
        if not lease.adopted:
            return await self._prepare() or await self._start()
        while True:
            begun = await self._find() or await self._prepare() or await self._start()
            # An attempt that ends here unstarted must not be started later by a slow previous owner.
            if not isinstance(begun, AttemptEnd) or self._over:
                return begun
            await require_trust(self._held)
            if await self._runner.forbid(self._identity, lease.domain):
                return begun
            await self._changes.wait(jitter(RETRY_SECONDS))

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
        await self._strategy.adopt(running)
        await self._take_over(running, running_now=state == "running")
        return state, running

    def _nothing_left(self) -> AttemptEnd:
        message = "the attempt was not found where it ran"
        return unless_stopped(self._held.stop, AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message=message)))

    async def _take_over(self, running: AttemptHandle, *, running_now: bool) -> None:
        """Send our token to the supervisor, which refuses commands of the previous owner from then on."""
        self._at("found")
        if running_now:
            self._link.adopted.clear()
            await self._link.take_control_if_adopting(running)
            if self._policy.stop_after is not None:
                self._link.renew_stop_after(running, self._held.renewed_at)

    async def _prepare(self) -> AttemptEnd | None:
        """Check the stop request, the spec and readiness. Return an AttemptEnd if the attempt must not start."""
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
                await make_ready(self._services, self._held, until=lambda: self._changes.interrupted)
            except CannotStart as error:
                return AttemptEnd(cause=Cause.START_FAILED, error=error.error)
            except CheckTimedOut as error:
                return AttemptEnd(cause=Cause.INTERRUPTED, error=Error(code="not_ready", message=str(error)))
        end = await self._strategy.prepare() if self._held.stop is None else None
        if (unwanted := self._unwanted()) is not None:
            return unwanted
        self._at("prepared")
        return end

    def _unwanted(self) -> AttemptEnd | None:
        """Return how the attempt ends if it must not be started any more."""
        self._changes.check()
        return None if self._held.stop is None else AttemptEnd(cause=stop_cause(self._held.stop))

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
            except StartTooLate:
                took = boottime() - began
                log.warning(
                    "job %s attempt %d: start %d of %d missed its deadline, after %.1f s; %s",
                    lease.id,
                    lease.attempt,
                    late,
                    LATE_STARTS,
                    took,
                    "starting it again" if late < LATE_STARTS else "failing the attempt",
                )
                if late < LATE_STARTS:  # Spread starts that were late together.
                    pause = backoff(late, base=max(RETRY_SECONDS, took), cap=LATE_SECONDS)
                    await self._changes.wait(jitter(pause, 0.9))
            except CannotStart as error:
                return AttemptEnd(cause=Cause.START_FAILED, error=error.error)
        message = f"{LATE_STARTS} starts took longer than the lease allows; the host or engine is overloaded"
        return AttemptEnd(cause=Cause.START_FAILED, error=Error(code="start_failed", message=message))

    async def _start_request(self) -> StartRequest:
        """Build the request for the runner. Its start deadline is the time until which the lease is trusted."""
        lease, policy = self._lease, self._policy
        await require_trust(self._held)
        least = 2 * self._services.settings.heartbeat_interval
        if policy.stop_after is not None and policy.stop_after < least:
            message = f"stop_after is {policy.stop_after:g} s; here it must be at least {least:g} s: two heartbeats"
            raise CannotStart("contract_violation", message)
        secrets = self._services.secrets(policy)
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
            pipeline=self._strategy.staging(),
        )

    def _files(self) -> Mapping[str, InputFile]:
        try:
            return input_files(self._services.artifacts, self._lease.id, self._policy.uploads)
        except NotFound as error:
            message = f"an upload of this job is not in the artifact store of this worker: {error}"
            raise CannotStart("start_failed", message) from error

    async def _confirm(self) -> None:
        """Check in the record that the lease is still ours, just before a start that has no check of its own."""
        self._at("created")
        await require_trust(self._held)
        store, lease = self._services.store, self._lease
        if not await with_retries(lambda: store.leases.owns(self._services.worker, lease), "checking the lease"):
            raise LeaseLost
        self._at("confirmed")

    def _at(self, step: str) -> None:
        self._services.at(step, self._lease)

    @property
    def _identity(self) -> Identity:
        return Identity(self._services.installation, self._lease.id, self._lease.attempt)
