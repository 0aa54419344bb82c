"""Why a supervised attempt ended: stop request, budget, loss, failed task, broken limit.

A signal has a reason: a stop request, a spent budget or a loss. An exit code is explained by the failed task, the last
line on stderr, or the limit that was broken.
"""

import msgspec

from holdfast.limits import AttemptLimits
from holdfast.model import Cause, Error
from holdfast.runner.base import AttemptEnd
from holdfast.worker.classify import unless_stopped
from holdfast.worker.event_writer import EventWriter
from holdfast.worker.execution_services import ExecutionServices
from holdfast.worker.held_leases import HeldLease
from holdfast.worker.last_error import LastError
from holdfast.worker.limit_checks import broken_limit
from holdfast.worker.recent_events import recent_events
from holdfast.worker.stop_sequence import budget_error

ITS_OWN = (Cause.EXIT, Cause.OUT_OF_MEMORY, Cause.TIMED_OUT, Cause.IDLE_TIMEOUT)
"""Causes that are due to the command itself, not to a request or a loss."""


class EndReason:
    """Finds the reason of one attempt's end."""

    def __init__(self, services: ExecutionServices, held: HeldLease, event_writer: EventWriter) -> None:
        self._services = services
        self._held = held
        self._lease = held.lease
        self._event_writer = event_writer

    async def of_a_stop(self, end: AttemptEnd) -> AttemptEnd:
        """Attribute an end by signal to its reason: a stop request, the budget, or a loss."""
        if end.cause in (Cause.CANCELLED, Cause.INTERRUPTED) and self._held.stop is None:
            self._held.receive_stop(await self._services.stops.ask(self._lease))
            if self._held.stop is None:
                over = self._event_writer.over_budget(self._lease.policy.budget)
                if over is not None:
                    error = budget_error(over)
                    return AttemptEnd(cause=end.cause, exit_code=end.exit_code, signal=end.signal, error=error)
                message = "the attempt was stopped without a stop request for this job"
                return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message=message))
        return unless_stopped(self._held.stop, end)

    async def of_a_failure(
        self, end: AttemptEnd, *, task: str | None, stderr: LastError, limits: AttemptLimits
    ) -> AttemptEnd:
        """Add the task that failed, and the last line on stderr, which a previous owner may have shipped."""
        if end.error is not None or end.cause not in ITS_OWN or (end.cause is Cause.EXIT and end.exit_code == 0):
            return end
        last = stderr.line(task)
        if last is None and self._lease.adopted:
            shipped = LastError()
            shipped.add_events(await recent_events(self._services.store, self._lease))
            last = shipped.line(task)
        end = msgspec.structs.replace(end, task=task, last_error=last)
        return msgspec.structs.replace(end, error=broken_limit(end, limits))
