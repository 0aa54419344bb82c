"""The stop of one attempt: why it is stopped, what has to be sent, and which phases have to be recorded. Pure, no I/O.

A stop begins with its first reason. A stronger one replaces it, and only then is the attempt told again:

    drain < limit < lost, timeout, idle_timeout, budget < interrupt < cancel < delete

A supervisor or a cancel token carries the stop out. The phases go in one direction only, and are recorded for stop
requests alone: nobody asked for the others. Supervised attempts and functions use the same sequence.
"""

from collections.abc import Mapping
from enum import StrEnum

from holdfast.budgets import EXCEEDED
from holdfast.model import Cause, Error, StopKind, StopPhase, StopRequest
from holdfast.runner.base import AttemptEnd

RESEND_SECONDS = 5.0
"""What is not acknowledged within this time is sent again."""


class StopReason(StrEnum):
    """Why this worker stops an attempt."""

    DRAIN = "drain"
    LIMIT = "limit"
    LOST = "lost"
    TIMEOUT = "timeout"
    IDLE_TIMEOUT = "idle_timeout"
    BUDGET = "budget"
    INTERRUPT = "interrupt"
    CANCEL = "cancel"
    DELETE = "delete"

    @classmethod
    def of(cls, stop: StopRequest) -> "StopReason":
        return cls(stop.kind.value)

    @property
    def requested(self) -> bool:
        """Whether the reason is a stop request."""
        return self in _REQUESTS

    @property
    def shown(self) -> str:
        """The reason as a supervisor or a function gets it: the deletion of a job stops it like a cancel."""
        return StopReason.CANCEL.value if self is StopReason.DELETE else self.value


_REQUESTS = frozenset(StopReason(kind.value) for kind in StopKind)
_STRENGTH: Mapping[StopReason, int] = {
    StopReason.DRAIN: 0,
    StopReason.LIMIT: 1,
    StopReason.LOST: 2,
    StopReason.TIMEOUT: 2,
    StopReason.IDLE_TIMEOUT: 2,
    StopReason.BUDGET: 2,
    StopReason.INTERRUPT: 3,
    StopReason.CANCEL: 4,
    StopReason.DELETE: 5,
}
_CAUSES: Mapping[StopReason, Cause] = {
    StopReason.DRAIN: Cause.DRAINED,
    StopReason.LIMIT: Cause.EXIT,
    StopReason.LOST: Cause.DRAINED,
    StopReason.TIMEOUT: Cause.TIMED_OUT,
    StopReason.IDLE_TIMEOUT: Cause.IDLE_TIMEOUT,
    StopReason.BUDGET: Cause.CANCELLED,
    StopReason.INTERRUPT: Cause.INTERRUPTED,
    StopReason.CANCEL: Cause.CANCELLED,
    StopReason.DELETE: Cause.CANCELLED,
}
_PHASES = [StopPhase.REQUESTED, StopPhase.SIGNALLED, StopPhase.KILLED, StopPhase.NOT_DEAD, StopPhase.DEAD]
"""The phases in order. What was reported as not dead may still die later."""


class StopSequence:
    """How far the stop of one attempt has come. An adopter begins with the phase in the record."""

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self.error: Error | None = None
        """More about the reason: the limit or the budget that was exceeded."""
        self.recorded = StopPhase.REQUESTED
        self._sent: StopReason | None = None
        self._sent_at = 0.0
        self._acknowledged = False

    def ask(self, reason: StopReason, error: Error | None = None) -> bool:
        """Ask for a stop. Return whether this is the reason now; one that is not stronger than the last is dropped."""
        if self.reason is not None and _STRENGTH[reason] <= _STRENGTH[self.reason]:
            return False
        self.reason, self.error = reason, error
        return True

    def ask_as_requested(self, stop: StopRequest | None) -> bool:
        """Ask for the stop that a stop request wants, if there is one."""
        return stop is not None and self.ask(StopReason.of(stop))

    def continue_from(self, stop: StopRequest) -> None:
        """Continue a stop that a previous owner of the attempt began."""
        self.ask_as_requested(stop)
        self.recorded = stop.phase

    def due(self, now: float) -> StopReason | None:
        """Return the reason to send now: it was not sent yet, or not acknowledged in time."""
        if self._sent is self.reason and (self._acknowledged or now - self._sent_at < RESEND_SECONDS):
            return None
        return self.reason

    def sent(self, reason: StopReason, now: float) -> None:
        self._sent, self._sent_at, self._acknowledged = reason, now, False

    def acknowledge(self) -> None:
        self._acknowledged = True

    def advance(self, phase: StopPhase) -> bool:
        """Advance to a phase. Return whether to record it: only for a stop request, each phase once and in order."""
        wanted = self.reason is not None and self.reason.requested
        if not wanted or _PHASES.index(phase) <= _PHASES.index(self.recorded):
            return False
        self.recorded = phase
        return True

    def end(self) -> AttemptEnd | None:
        """Return how an attempt ends that obeyed the stop, or None without a stop."""
        return None if self.reason is None else AttemptEnd(cause=_CAUSES[self.reason], error=self.error)


def budget_error(message: str) -> Error:
    return Error(code=EXCEEDED, message=message)
