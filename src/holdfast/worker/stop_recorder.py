"""Records the phases of an attempt's stop sequence, for people and for an adopter that continues it."""

import asyncio

from holdfast.model import StopPhase
from holdfast.worker.batch_writer import with_retries
from holdfast.worker.execution_services import ExecutionServices
from holdfast.worker.held_leases import HeldLease
from holdfast.worker.stop_sequence import StopSequence


class StopRecorder:
    """Records each phase once, one at a time and in order. The writes are fenced by the lease."""

    def __init__(self, services: ExecutionServices, held: HeldLease, sequence: StopSequence) -> None:
        self._services = services
        self._held = held
        self._sequence = sequence
        self._one_at_a_time = asyncio.Lock()

    async def record(self, phase: StopPhase) -> bool:
        """Record a phase if it is new. Return False if the lease is lost."""
        lease = self._held.lease
        async with self._one_at_a_time:
            self._sequence.ask_as_requested(self._held.stop)
            if not self._sequence.advance(phase):
                return True
            grace = lease.policy.stop_grace if phase is StopPhase.SIGNALLED else None
            advance = self._services.store.leases.advance_stop
            return await with_retries(lambda: advance(lease, phase, grace=grace), "recording a stop phase")
