"""Stores the outputs of one attempt, retrying while storage is unavailable: there is no other copy of them."""

import asyncio
import logging

import msgspec

from holdfast.errors import StoreError
from holdfast.model import Cause, Error
from holdfast.runner.artifacts import outputs_name
from holdfast.runner.base import AttemptEnd, EngineUnreachable
from holdfast.runner.secrets import Mask
from holdfast.worker.attempt_changes import AttemptChanges
from holdfast.worker.classify import OUTPUTS_NOT_STORED, stop_cause
from holdfast.worker.collect import CollectOutputs, OutputsNotStored, collect_outputs
from holdfast.worker.event_writer import EventWriter
from holdfast.worker.execution_services import ExecutionServices
from holdfast.worker.held_leases import HeldLease, boottime

log = logging.getLogger(__name__)

STOPPED_TRIES = 3
"""How often we try to store the outputs of a job that has a stop request: it need not wait for disk space."""


class OutputCollector:
    """Collects the outputs of one attempt."""

    def __init__(
        self, services: ExecutionServices, held: HeldLease, event_writer: EventWriter, changes: AttemptChanges
    ) -> None:
        self._services = services
        self._held = held
        self._lease = held.lease
        self._event_writer = event_writer
        self._changes = changes

    async def collect(self, collect: CollectOutputs, end: AttemptEnd, mask: Mask) -> AttemptEnd:
        """Collect the outputs and return the end with them; or what becomes of the end if they cannot be stored."""
        n = 0
        give_up_at = boottime() + self._services.settings.outputs_timeout
        while True:
            try:
                return await collect_outputs(self._services, self._lease, collect, end, mask, self._event_writer)
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
                await self._changes.wait_for_engine(n)

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

    async def drop(self) -> None:
        """Remove the outputs of an attempt that is not in the record: its job has moved on or was deleted."""
        lease = self._lease
        ours = (lease.id, lease.attempt, lease.token)
        try:
            if ours not in await self._services.store.attempts.tokens([lease.id]):
                name = outputs_name(lease.attempt, lease.token)
                await asyncio.to_thread(self._services.artifacts.remove, lease.id, name)
        except StoreError as error:
            log.info("job %s attempt %d: its outputs are left to the sweep: %s", lease.id, lease.attempt, error)
