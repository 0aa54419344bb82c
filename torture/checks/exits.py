"""Did workers and servers exit only when they were signalled or killed, and with a good status?"""

import signal
from collections.abc import Iterator, Mapping

from torture.cases import Case
from torture.history import HARNESS, Fault, History, ProcessExit
from torture.lease_holders import AWAY, clipped, length

Found = Iterator[tuple[str, str]]

KILLED = frozenset({"kill worker", "kill server"})
TOLD = frozenset({"end worker", "end server"})
LEFT_AT_ONCE = 1
"""The exit status after a second signal: the process exits immediately, and says that it did not end in order."""
NO_DATABASE = 3
"""The exit status of a process that cannot start because it cannot reach the database."""
STOOD = 5.0
"""If the harness gets no CPU for this many seconds, clients of its proxies give up."""
LATELY = 30.0
"""A process that cannot reach the database gives up within this many seconds."""


def processes_exit_only_when_told(history: History, cases: Mapping[str, Case]) -> Found:
    """A worker or server exits only when it is told to. The harness restarts it, which would hide a crash."""
    for process_exit in history.exits:
        mine = [fault.kind for fault in history.faults if fault.target == process_exit.part]
        signals = sum(kind in TOLD for kind in mine)
        if not (
            KILLED & set(mine)
            or process_exit.status in _ways_to_leave(signals)
            or _could_not_begin(history, process_exit)
        ):
            yield (
                process_exit.part,
                f"{process_exit.part} ended {'badly' if signals else 'by itself'}, with {process_exit.status}",
            )


def _ways_to_leave(signals: int) -> set[int]:
    """Return the exit statuses that are fine after this many signals: 0, or SIGTERM before it listened."""
    if not signals:
        return set()
    return {0, -signal.SIGTERM} | ({LEFT_AT_ONCE} if signals > 1 else set())


def _could_not_begin(history: History, process_exit: ProcessExit) -> bool:
    """Whether the database could not be reached: it was away, cut off, or its proxy stood still."""
    stood = [(lag.begin, lag.end) for lag in history.lags if lag.worker == HARNESS]
    kept = any(_kept_from_it(fault, process_exit) for fault in history.faults)
    return process_exit.status == NO_DATABASE and (
        kept or length(clipped(stood, process_exit.at - LATELY, process_exit.at)) > STOOD
    )


def _kept_from_it(fault: Fault, process_exit: ProcessExit) -> bool:
    """Whether a fault kept a part from the database lately. A partition outlives the process that it began with.

    SQLite's file can be read and not be written to: its disk is full, or somebody was stopped in the middle of a write.
    """
    same = fault.kind == "partition" and fault.target.partition(".")[0] == process_exit.part.partition(".")[0]
    shut = fault.kind == "stopped writer" or (fault.kind, fault.target) == ("full disk", "data")
    return (
        (same or shut or fault.kind in AWAY) and fault.at <= process_exit.at and fault.until >= process_exit.at - LATELY
    )


RULES = (processes_exit_only_when_told,)
