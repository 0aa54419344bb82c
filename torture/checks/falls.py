"""Did workers and servers end only when they were told to, or killed? And did those that were told to leave well?"""

import signal
from collections.abc import Iterator, Mapping

from torture.cases import Case
from torture.history import HARNESS, Fall, Fault, History
from torture.holders import AWAY, clipped, length

Found = Iterator[tuple[str, str]]

KILLED = frozenset({"kill worker", "kill server"})
TOLD = frozenset({"end worker", "end server"})
LEFT_AT_ONCE = 1
"""The exit status after a second signal: the process exits immediately, and says that it did not end in order."""
NO_DATABASE = 3
"""The status of what cannot begin because the database is away, or it is cut off from it."""
STOOD = 5.0
"""Seconds without a turn for the harness after which who waits for an answer through its proxies gives up."""
LATELY = 30.0
"""Seconds within which who cannot reach the database gives up."""


def nobody_falls_by_itself(history: History, cases: Mapping[str, Case]) -> Found:
    """A worker or server ends when it is told to. What falls is started again here, which would hide it."""
    for fall in history.falls:
        mine = [fault.kind for fault in history.faults if fault.target == fall.part]
        told = sum(kind in TOLD for kind in mine)
        if not (KILLED & set(mine) or fall.status in _ways_to_leave(told) or _could_not_begin(history, fall)):
            yield fall.part, f"{fall.part} ended {'badly' if told else 'by itself'}, with {fall.status}"


def _ways_to_leave(told: int) -> set[int]:
    """With what status a part may end that was told to so often: well, or before it could listen."""
    if not told:
        return set()
    return {0, -signal.SIGTERM} | ({LEFT_AT_ONCE} if told > 1 else set())


def _could_not_begin(history: History, fall: Fall) -> bool:
    """Whether the database could not be reached: it was away, cut off, or its proxy stood still."""
    stood = [(lag.begin, lag.end) for lag in history.lags if lag.worker == HARNESS]
    kept = any(_kept_from_it(fault, fall) for fault in history.faults)
    return fall.status == NO_DATABASE and (kept or length(clipped(stood, fall.at - LATELY, fall.at)) > STOOD)


def _kept_from_it(fault: Fault, fall: Fall) -> bool:
    """Whether a fault kept a part from the database lately. A partition outlives the process that it began with.

    SQLite's file can be read and not be written to: its disk is full, or somebody was stopped in the middle of a write.
    """
    same = fault.kind == "partition" and fault.target.partition(".")[0] == fall.part.partition(".")[0]
    shut = fault.kind == "stopped writer" or (fault.kind, fault.target) == ("full disk", "data")
    return (same or shut or fault.kind in AWAY) and fault.at <= fall.at and fault.until >= fall.at - LATELY


RULES = (nobody_falls_by_itself,)
