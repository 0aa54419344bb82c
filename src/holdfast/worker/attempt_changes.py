"""Wakes an execution when something changes for its attempt: its end, its lease, a stop request, or a drain."""

import asyncio
import contextlib

from holdfast.timing import backoff, jitter
from holdfast.worker.execution_services import ExecutionServices, HandOverRequested
from holdfast.worker.held_leases import HeldLease


class AttemptChanges:
    """The changes of one attempt, and waits that they end."""

    def __init__(self, services: ExecutionServices, held: HeldLease) -> None:
        self._services = services
        self._held = held
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()

    @property
    def interrupted(self) -> bool:
        """Whether the attempt is stopped, lost or to be handed over."""
        return self._held.lost or self._held.stop is not None or self._services.draining.is_set()

    def check(self) -> None:
        """Raise LeaseLost or HandOverRequested if the execution must not continue here."""
        self._held.check()
        if self._services.draining.is_set():
            raise HandOverRequested

    async def wait(self, seconds: float) -> None:
        """Wait for a change, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def wait_for_engine(self, n: int) -> None:
        """Wait before the nth repetition of a call to an engine or a folder that is unavailable."""
        self.check()
        await self.wait(jitter(backoff(n, base=0.1, cap=5.0)))
