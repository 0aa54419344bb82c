"""Commands to one supervisor, repeated until it acknowledges them, and the progress of its stop sequence."""

import asyncio
from typing import Any

from holdfast.model import Error, StopKind, StopPhase
from holdfast.runner.base import AttemptHandle, EngineUnreachable
from holdfast.runner.wire import Command, truncated
from holdfast.worker.batch_writer import with_retries
from holdfast.worker.execution_services import ExecutionServices
from holdfast.worker.held_leases import HeldLease, LeaseLost, until_trusted

ACK_SECONDS = 5.0
"""A command that is not acknowledged within this time is sent again."""
STOP_STEPS = {"signalled": StopPhase.SIGNALLED, "killed": StopPhase.KILLED, "not_dead": StopPhase.NOT_DEAD}
STOP_ORDER = [StopPhase.REQUESTED, StopPhase.SIGNALLED, StopPhase.KILLED, StopPhase.NOT_DEAD, StopPhase.DEAD]
"""The phases of a stop in order. What was reported as not dead may still die later."""


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
        self.recorded_phase = StopPhase.REQUESTED
        """The latest phase of the stop sequence in the record."""
        self._hold_sent_at = float("-inf")
        self._sent: StopKind | None = None
        self._sent_at = 0.0
        self._acked: set[str] = set()
        self._stop_phases: list[StopPhase] = []

    async def take_control_if_adopting(self, running: AttemptHandle) -> None:
        """Repeat the `hold` command until the supervisor has acknowledged it: only then is the adoption complete."""
        now = asyncio.get_running_loop().time()
        if not self.adopted.is_set() and "hold" in self._acked:
            self.adopted.set()
            self._services.at("adopted", self._lease)
        elif not self.adopted.is_set() and now - self._hold_sent_at > ACK_SECONDS:
            if not await until_trusted(self._held):
                raise LeaseLost
            if await self._send(running, Command(token=self._lease.token, verb="hold")):
                self._hold_sent_at = now

    async def stop_if_asked(
        self, running: AttemptHandle, *, over_budget: bool, over_limit: Error | None = None
    ) -> None:
        """Send the requested stop until the supervisor acknowledges it. The supervisor runs the stop sequence itself.

        A broken limit is sent along: the supervisor keeps it in the exit record.
        """
        stop = self._held.stop
        wanted = stop.kind if stop is not None else StopKind.CANCEL if over_budget or over_limit else None
        now = asyncio.get_running_loop().time()
        if wanted is None or (self._sent is wanted and ("stop" in self._acked or now - self._sent_at < ACK_SECONDS)):
            return
        if not await until_trusted(self._held):
            raise LeaseLost
        kind: Any = "interrupt" if wanted is StopKind.INTERRUPT else "cancel"
        self._acked.discard("stop")
        text = None
        if stop is None and not over_budget and over_limit is not None:
            kind, text = "fail", truncated(f"{over_limit.code}: {over_limit.message}")
        stop_now = Command(token=self._lease.token, verb="stop", kind=kind, grace=self._policy.stop_grace, text=text)
        if await self._send(running, stop_now):
            self._sent, self._sent_at = wanted, now
            self._services.at("stop_sent", self._lease)

    async def _send(self, running: AttemptHandle, command: Command) -> bool:
        """Send a command. Return False if the engine is unreachable and the command must be sent again."""
        try:
            await running.send(command)
        except EngineUnreachable:
            return False
        return True

    def on_event(self, event: dict[str, Any]) -> None:
        """Process an event of the supervisor: an acknowledgement, or progress of the stop sequence."""
        name = event.get("event")
        if name == "ack" and event.get("ok") and event.get("token") == self._lease.token:
            self._acked.add(str(event.get("verb")))
        elif name in STOP_STEPS and event.get("reason", "cancelled") in ("cancelled", "interrupted"):
            self._stop_phases.append(STOP_STEPS[name])

    async def record_stop_phases(self) -> None:
        """Record each new phase of the stop sequence once, for operators and for an adopter to continue from."""
        phases, self._stop_phases = self._stop_phases, []
        for phase in phases:
            await self.record_stop_phase(phase)

    async def record_stop_phase(self, phase: StopPhase) -> None:
        if self._held.stop is None or STOP_ORDER.index(phase) <= STOP_ORDER.index(self.recorded_phase):
            return
        self.recorded_phase = phase
        grace = self._policy.stop_grace if phase is StopPhase.SIGNALLED else None
        advance = self._services.store.leases.advance_stop
        await with_retries(lambda: advance(self._lease, phase, grace=grace), "recording a stop phase")

    def renew_stop_after(self, running: AttemptHandle, requested: float) -> None:
        """Extend the child's own deadline, counted from when the last successful heartbeat was sent."""
        assert self._policy.stop_after is not None
        running.send_from_thread(
            Command(token=self._lease.token, verb="beat", stop_after=requested + self._policy.stop_after)
        )
