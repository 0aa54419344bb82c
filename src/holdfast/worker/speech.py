"""What an execution says to its supervisor until it was heard, and what it hears of it."""

import asyncio
from typing import Any

from holdfast.model import StopKind, StopPhase
from holdfast.runner.base import EngineUnreachable, Running
from holdfast.runner.spec import Command
from holdfast.worker.completer import retried
from holdfast.worker.desk import Desk
from holdfast.worker.lease import Hold, Lost, until_trusted

ACK_SECONDS = 5.0
"""After so long without an answer a thing is said again."""
LADDER = {"signalled": StopPhase.SIGNALLED, "killed": StopPhase.KILLED, "not_dead": StopPhase.NOT_DEAD}
ORDER = [StopPhase.REQUESTED, StopPhase.SIGNALLED, StopPhase.KILLED, StopPhase.NOT_DEAD, StopPhase.DEAD]
"""The rungs from the first to the last: what was told as not dead may be dead in the end."""


class Speech:
    """Between one execution and its supervisor."""

    def __init__(self, desk: Desk, hold: Hold) -> None:
        self._desk = desk
        self._hold = hold
        self._lease = hold.lease
        self._policy = hold.lease.policy
        self.adopted = asyncio.Event()
        """Whether its supervisor listens to us alone: from the start on, or once it has acknowledged an adoption."""
        self.adopted.set()
        self.told = StopPhase.REQUESTED
        """How far the ladder has come, as the record says."""
        self._held_at = float("-inf")
        self._sent: StopKind | None = None
        self._sent_at = 0.0
        self._acked: set[str] = set()
        self._rungs: list[StopPhase] = []

    async def hold_if_adopting(self, running: Running) -> None:
        """Say it again until the supervisor has acknowledged: only then is the adoption done."""
        now = asyncio.get_running_loop().time()
        if not self.adopted.is_set() and "hold" in self._acked:
            self.adopted.set()
            self._desk.at("adopted", self._lease)
        elif not self.adopted.is_set() and now - self._held_at > ACK_SECONDS:
            if not await until_trusted(self._hold):
                raise Lost
            if await self._tell(running, Command(token=self._lease.token, verb="hold")):
                self._held_at = now

    async def stop_if_asked(self, running: Running, *, over_budget: bool) -> None:
        """Send the stop that was asked for, until its supervisor has acknowledged it; the ladder is its own."""
        stop = self._hold.stop
        wanted = stop.kind if stop is not None else StopKind.CANCEL if over_budget else None
        now = asyncio.get_running_loop().time()
        if wanted is None or (self._sent is wanted and ("stop" in self._acked or now - self._sent_at < ACK_SECONDS)):
            return
        if not await until_trusted(self._hold):
            raise Lost
        kind: Any = "interrupt" if wanted is StopKind.INTERRUPT else "cancel"
        self._acked.discard("stop")
        stop_now = Command(token=self._lease.token, verb="stop", kind=kind, grace=self._policy.stop_grace)
        if await self._tell(running, stop_now):
            self._sent, self._sent_at = wanted, now
            self._desk.at("told", self._lease)

    async def _tell(self, running: Running, command: Command) -> bool:
        """Leave a command; False if its engine is away, and it has to be said again."""
        try:
            await running.tell(command)
        except EngineUnreachable:
            return False
        return True

    def hear(self, event: dict[str, Any]) -> None:
        """What a supervisor says of itself."""
        name = event.get("event")
        if name == "ack" and event.get("ok") and event.get("token") == self._lease.token:
            self._acked.add(str(event.get("verb")))
        elif name in LADDER and event.get("reason", "cancelled") in ("cancelled", "interrupted"):
            self._rungs.append(LADDER[name])

    async def tell_rungs(self) -> None:
        """Write how far the ladder has come, each rung once, so that people see it and an adopter goes on there."""
        rungs, self._rungs = self._rungs, []
        for rung in rungs:
            await self.tell_rung(rung)

    async def tell_rung(self, rung: StopPhase) -> None:
        if self._hold.stop is None or ORDER.index(rung) <= ORDER.index(self.told):
            return
        self.told = rung
        grace = self._policy.stop_grace if rung is StopPhase.SIGNALLED else None
        await retried(lambda: self._desk.store.leases.advance_stop(self._lease, rung, grace=grace), "a stop")

    def renew_stop_after(self, running: Running, requested: float) -> None:
        """Put the child's own deadline off, from the moment when a heartbeat was asked for that landed."""
        assert self._policy.stop_after is not None
        running.tell_now(Command(token=self._lease.token, verb="beat", stop_after=requested + self._policy.stop_after))
