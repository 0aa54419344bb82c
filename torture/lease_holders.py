"""Which worker held a job's lease and when, and what kept that worker from working."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from torture.cases import Case
from torture.history import Beat, Fault, History, Lag, Write

Interval = tuple[float, float]

CUT_OFF = frozenset({"kill worker", "stop worker", "end worker", "partition", "slow partition", "half-close"})
"""Faults that keep one worker from its heartbeats."""
AWAY = frozenset({"restart of Postgres", "crash of Postgres"})
"""Faults that keep every worker from them."""
ENGINE = frozenset({"restart of dockerd", "crash of dockerd", "hung dockerd"})
BUSY = frozenset({"starve", "stopped writer", "full disk", "latency"})
"""Faults that slow down nearly every process."""


class LeaseHolding(msgspec.Struct, frozen=True):
    """The time in which one worker held a lease; `end` is infinite while it still does."""

    worker: str
    begin: float
    end: float


def lease_holdings(case: Case) -> list[LeaseHolding]:
    """Return who held a job, in order of time."""
    found: list[LeaseHolding] = []
    for event in case.events:
        taken = event.type == "lease" and event.data["lease"] == "adopted"
        if event.type == "status" or (event.type == "lease" and not taken):
            found[-1:] = [_until(holding, event.at) for holding in found[-1:]]
        if taken or (event.type == "status" and event.data["status"] == "running" and "worker" in event.data):
            found.append(LeaseHolding(str(event.data["worker"]), event.at, float("inf")))
    return found


def _until(holding: LeaseHolding, at: float) -> LeaseHolding:
    return msgspec.structs.replace(holding, end=min(holding.end, at))


class WorkerActivity:
    """Everything known about one worker."""

    def __init__(self, away: Sequence[Interval]) -> None:
        self.beats: list[Beat] = []
        self.lags: list[Lag] = []
        self.faults: list[Fault] = []
        self.writes: list[Write] = []
        self._away = away

    def renewed(self, lease: tuple[str, int], before: float) -> float:
        """When the last heartbeat that renewed a lease was asked for; minus infinity if none was."""
        found = (beat.asked for beat in self.beats if beat.asked < before and lease in (beat.renewed or ()))
        return max(found, default=float("-inf"))

    def last_beat(self, job: str, before: float) -> float:
        """When the last heartbeat was asked for that renewed a job's lease, under whatever token."""
        return max(
            (
                beat.asked
                for beat in self.beats
                if beat.asked < before and any(id == job for id, _ in beat.renewed or ())
            ),
            default=float("-inf"),
        )

    def gave_back(self, job: str, token: int) -> bool:
        """Whether it gave a lease back by itself."""
        return any((write.what, write.job, write.token) == ("hand_over", job, token) for write in self.writes)

    def was_gone(self, before: float) -> bool:
        """Whether its process had been told to end, or killed."""
        return any(fault.kind in ("kill worker", "end worker") and fault.at <= before for fault in self.faults)

    def struck(self) -> list[Interval]:
        return [(fault.at, fault.until) for fault in self.faults]

    def slow(self) -> list[Interval]:
        """Return when its process got no CPU, or a heartbeat no answer."""
        return [(lag.begin, lag.end) for lag in self.lags] + [(beat.asked, beat.answered) for beat in self.beats]

    def held_up(self, since: float, until: float) -> float:
        """For how long it was kept from its work, while the database was there."""
        within = clipped([*self.slow(), *self.struck()], since, until)
        return length([*within, *self._away]) - length(self._away)


def activities(history: History) -> Mapping[str, WorkerActivity]:
    away = [(fault.at, fault.until) for fault in history.faults if fault.kind in AWAY]
    found: dict[str, WorkerActivity] = defaultdict(lambda: WorkerActivity(away))
    for beat in history.beats:
        found[beat.worker].beats.append(beat)
    for lag in history.lags:
        found[lag.worker].lags.append(lag)
    for write in history.writes:
        found[write.worker].writes.append(write)
    for fault in history.faults:
        if fault.kind in CUT_OFF:
            found[fault.target].faults.append(fault)
    return found


def clipped(intervals: Iterable[Interval], since: float, until: float) -> list[Interval]:
    return [(max(begin, since), min(end, until)) for begin, end in intervals]


def length(intervals: Iterable[Interval]) -> float:
    """The time that is in at least one of these."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(intervals):
        if stop > max(begin, end):
            total += stop - max(begin, end)
            end = stop
    return total
