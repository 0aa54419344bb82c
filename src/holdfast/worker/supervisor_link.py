"""The link of one execution to its supervisor: commands, repeated until they are acknowledged or carried out, and the
supervisor's events about them.

Every command carries the token of the lease, and is sent only while the lease is trusted: a supervisor that an adopter
commands refuses ours.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from holdfast.model import StopPhase
from holdfast.runner.base import AttemptHandle, EngineUnreachable
from holdfast.runner.wire import Command, truncated
from holdfast.worker.execution_services import ExecutionServices
from holdfast.worker.held_leases import HeldLease, LeaseLost, require_trust
from holdfast.worker.stop_recorder import StopRecorder
from holdfast.worker.stop_sequence import StopReason, StopSequence

log = logging.getLogger(__name__)

ACK_SECONDS = 5.0
"""A command that is not acknowledged or carried out within this time is sent again."""
POLL_SECONDS = 0.02
"""Seconds between polls while we wait for an event of the supervisor or for the service to become ready."""
FAILED_SECONDS = 0.25
"""Seconds before a command is sent again that could not be sent."""
STOP_STEPS = {"signalled": StopPhase.SIGNALLED, "killed": StopPhase.KILLED, "not_dead": StopPhase.NOT_DEAD}


class SupervisorLink:
    """The connection of one execution to its supervisor."""

    def __init__(self, services: ExecutionServices, held: HeldLease) -> None:
        self._services = services
        self._held = held
        self._lease = held.lease
        self._policy = held.lease.policy
        self.adopted = asyncio.Event()
        """Set while the supervisor obeys only us: after our own start, or once it has acknowledged an adoption."""
        self.adopted.set()
        self.stop = StopSequence()
        self._recorder = StopRecorder(services, held, self.stop)
        self._phases: list[StopPhase] = []
        self._hold = Command(token=held.lease.token, verb="hold")
        self._hold_sent_at = float("-inf")
        self._hold_acknowledged = False

    async def take_control_if_adopting(self, running: AttemptHandle) -> None:
        """Repeat the `hold` command until the supervisor has acknowledged it: only then is the adoption complete."""
        if self.adopted.is_set():
            return
        now = asyncio.get_running_loop().time()
        if self._hold_acknowledged:
            self.adopted.set()
            self._services.at("adopted", self._lease)
        elif now - self._hold_sent_at > ACK_SECONDS and await self._send(running, self._hold):
            self._hold_sent_at = now

    async def stop_if_asked(self, running: AttemptHandle) -> None:
        """Send the stop until the supervisor acknowledges it. The supervisor signals, waits and kills by itself.

        A broken limit is sent along: the supervisor keeps it in the exit record.
        """
        self.stop.ask_as_requested(self._held.stop)
        now = asyncio.get_running_loop().time()
        reason = self.stop.due(now)
        if reason is not None and await self._send(running, self._stop_command(reason)):
            self.stop.sent(reason, now)
            self._services.at("stop_sent", self._lease)

    def _stop_command(self, reason: StopReason) -> Command:
        token, grace, error = self._lease.token, self._policy.stop_grace, self.stop.error
        if reason is StopReason.LIMIT and error is not None:
            text = truncated(f"{error.code}: {error.message}")
            return Command(token=token, verb="stop", kind="fail", grace=grace, text=text)
        kind: Any = "interrupt" if reason is StopReason.INTERRUPT else "cancel"
        return Command(token=token, verb="stop", kind=kind, grace=grace)

    async def _send(self, running: AttemptHandle, command: Command) -> bool:
        """Send a command. Return False if the engine is unreachable and the command must be sent again."""
        await require_trust(self._held)
        try:
            await running.send(command)
        except EngineUnreachable:
            return False
        return True

    async def send_until(self, running: AttemptHandle, command: Command, done: Callable[[], bool]) -> None:
        """Repeat a command until it is carried out; one that ends the attempt, until the caller cancels us."""
        while not done():
            await require_trust(self._held)
            try:
                await running.send(command)
            except (EngineUnreachable, OSError) as error:  # A full disk may have room soon.
                log.warning(
                    "job %s attempt %d: cannot send command %s, retrying: %s",
                    self._lease.id,
                    self._lease.attempt,
                    command.verb,
                    error,
                )
                await asyncio.sleep(FAILED_SECONDS)
                continue
            try:
                async with asyncio.timeout(ACK_SECONDS):
                    await until(done)
            except TimeoutError:
                pass

    def on_event(self, event: dict[str, Any]) -> None:
        """Process an event of the supervisor: an acknowledgement, or progress of the stop sequence."""
        name = event.get("event")
        if name == "ack" and event.get("ok") and event.get("token") == self._lease.token:
            if event.get("verb") == "hold":
                self._hold_acknowledged = True
            elif event.get("verb") == "stop":
                self.stop.acknowledge()
        elif name in STOP_STEPS and event.get("reason", "cancelled") in ("cancelled", "interrupted"):
            self._phases.append(STOP_STEPS[name])

    async def record_stop_phases(self) -> None:
        """Record the phases of the stop sequence that the supervisor has reported."""
        phases, self._phases = self._phases, []
        for phase in phases:
            await self.record_stop_phase(phase)

    async def record_stop_phase(self, phase: StopPhase) -> None:
        if not await self._recorder.record(phase):
            raise LeaseLost

    def renew_stop_after(self, running: AttemptHandle, requested: float) -> None:
        """Extend the child's own deadline, counted from when the last successful heartbeat was sent."""
        assert self._policy.stop_after is not None
        running.send_from_thread(
            Command(token=self._lease.token, verb="beat", stop_after=requested + self._policy.stop_after)
        )


async def until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110 - the service writes its ready file without an event
        await asyncio.sleep(POLL_SECONDS)
