"""Statuses, gates, causes and stop requests; the one table of legal moves, and what follows from a stop or a cause.

What each move writes is in `store/sql/transitions.sql`, which is made from these tables where it repeats them.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


class Status(StrEnum):
    """Where a job is in its life."""

    PENDING = "pending"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self in TERMINAL


TERMINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.TIMED_OUT, Status.CANCELLED})

WAITING = frozenset({Status.PENDING, Status.QUEUED})

BROKEN = frozenset({Status.FAILED, Status.TIMED_OUT, Status.CANCELLED})


class Gate(StrEnum):
    """Why a waiting job waits. `open` is claimable."""

    OPEN = "open"
    FUTURE = "future"
    NEEDS = "needs"
    LANE = "lane"
    HELD = "held"
    UNRESOLVED = "unresolved"


class Phase(StrEnum):
    CLAIMED = "claimed"
    STARTED = "started"


class Cause(StrEnum):
    """Why an attempt ended."""

    EXIT = "exit"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    IDLE_TIMEOUT = "idle_timeout"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    LOST = "lost"
    START_FAILED = "start_failed"
    DRAINED = "drained"


class StopKind(StrEnum):
    """What a stop request asks for; a later one only escalates, in this order."""

    INTERRUPT = "interrupt"
    CANCEL = "cancel"
    DELETE = "delete"

    def escalates(self, other: "StopKind | None") -> bool:
        order = list(StopKind)
        return other is None or order.index(self) > order.index(other)


class StopEnd(NamedTuple):
    """How an attempt ends because of a stop request."""

    status: Status
    cause: Cause
    code: str
    message: str


_CANCELLED = StopEnd(Status.CANCELLED, Cause.CANCELLED, "cancelled", "cancelled by request")

STOPPED: Mapping[StopKind, StopEnd] = MappingProxyType(
    {
        StopKind.INTERRUPT: StopEnd(Status.PAUSED, Cause.INTERRUPTED, "interrupted", "interrupted by request"),
        StopKind.CANCEL: _CANCELLED,
        StopKind.DELETE: _CANCELLED,
    }
)
"""What follows from a stop request; a requeue that finds one becomes this end."""

COUNTED_CAUSES = frozenset({Cause.LOST, Cause.START_FAILED})
"""Causes that use up an attempt even if it never started."""

UNCOUNTED_CAUSES = frozenset({Cause.DRAINED})
"""Causes that use up none."""


def uses_up_attempt(cause: Cause, phase: Phase) -> bool:
    """Return whether an ended attempt counts against `max_attempts`."""
    return cause not in UNCOUNTED_CAUSES and (phase is Phase.STARTED or cause in COUNTED_CAUSES)


class StopPhase(StrEnum):
    """How far the stop sequence has come."""

    REQUESTED = "requested"
    SIGNALLED = "signalled"
    KILLED = "killed"
    DEAD = "dead"
    NOT_DEAD = "not_dead"


class Verb(StrEnum):
    RELEASE = "release"
    CLAIM = "claim"
    ADOPT = "adopt"
    FINISH = "finish"
    REQUEUE = "requeue"
    CANCEL = "cancel"
    INTERRUPT = "interrupt"
    RESUME = "resume"
    RESOLVE = "resolve"
    DISMISS = "dismiss"
    EXPIRE = "expire"
    FAIL = "fail"
    REVIVE = "revive"
    ABANDON = "abandon"


def _moves() -> Mapping[Verb, Mapping[Status, frozenset[Status]]]:
    s = Status
    table: dict[Verb, dict[Status, set[Status]]] = {
        Verb.RELEASE: {s.PENDING: {s.QUEUED}},
        Verb.CLAIM: {s.QUEUED: {s.RUNNING}},
        # Adopting keeps a running job running; a paused one is adopted when its loss could not be verified.
        Verb.ADOPT: {s.RUNNING: {s.RUNNING}, s.PAUSED: {s.RUNNING}},
        Verb.FINISH: {s.RUNNING: {s.SUCCEEDED, s.FAILED, s.TIMED_OUT, s.CANCELLED, s.PAUSED}},
        # A pending stop request turns a requeue into the stop.
        Verb.REQUEUE: {s.RUNNING: {s.QUEUED, s.CANCELLED, s.PAUSED}},
        # Running stays running: the stop request is written and its owner carries it out.
        Verb.CANCEL: {
            s.PENDING: {s.CANCELLED},
            s.QUEUED: {s.CANCELLED},
            s.RUNNING: {s.RUNNING},
            s.PAUSED: {s.CANCELLED},
            s.CANCELLED: {s.CANCELLED},
        },
        Verb.INTERRUPT: {
            s.PENDING: {s.CANCELLED},
            s.QUEUED: {s.CANCELLED},
            s.RUNNING: {s.RUNNING},
            s.PAUSED: {s.PAUSED},
        },
        Verb.RESUME: {
            s.PAUSED: {s.QUEUED},
            s.FAILED: {s.QUEUED},
            s.TIMED_OUT: {s.QUEUED},
            s.CANCELLED: {s.QUEUED},
        },
        Verb.RESOLVE: {s.PAUSED: {s.SUCCEEDED}, s.FAILED: {s.SUCCEEDED}, s.TIMED_OUT: {s.SUCCEEDED}},
        Verb.DISMISS: {s.FAILED: {s.FAILED}, s.TIMED_OUT: {s.TIMED_OUT}},
        # Moves of the store itself: queue timeout, a failed dependency, its revival, an orphan that is given up.
        Verb.EXPIRE: {s.QUEUED: {s.TIMED_OUT}},
        Verb.FAIL: {s.PENDING: {s.FAILED}, s.QUEUED: {s.FAILED}},
        Verb.REVIVE: {s.FAILED: {s.QUEUED, s.PENDING}},
        Verb.ABANDON: {s.RUNNING: {s.PAUSED}},
    }
    return MappingProxyType(
        {
            verb: MappingProxyType({source: frozenset(targets) for source, targets in moves.items()})
            for verb, moves in table.items()
        }
    )


MOVES = _moves()


def is_legal(verb: Verb, source: Status) -> bool:
    """Return whether the table of moves has this verb for a job in this status."""
    return source in MOVES[verb]
