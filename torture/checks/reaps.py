"""Was a lease taken only from a worker that was gone? By the faults, and by the witness within each worker."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torture.cases import Case
from torture.checks.runs import BLUR
from torture.history import Beat, Event, Fault, History, Lag

Found = Iterator[tuple[str, str]]
Interval = tuple[float, float]

CUT_OFF = frozenset({"kill worker", "stop worker", "end worker", "partition", "slow partition", "half-close"})
"""What keeps one worker from its heartbeats."""
AWAY = frozenset({"restart of Postgres", "crash of Postgres"})
"""What keeps everybody from them: that is no reason to take a lease from anybody."""
ENOUGH = 1 / 2
"""The share of a lease's time that a worker lost to a machine that had other things to do, and that explains a reap.

Also after an outage: a reaper then waits for two thirds, and between three tries to beat a worker rests for a sixth.
"""


def reaps_have_a_reason(history: History, cases: Mapping[str, Case]) -> Found:
    """L18: a lease is taken only when it has expired, from a worker that was dead, stopped, cut off, or held up.

    That the database was away is no reason: it was away for those who beat, and they get the time to beat again.
    """
    workers = _witnesses(history)
    for case in cases.values():
        for event in case.events:
            if event.type != "lease" or event.data["lease"] != "reaped":
                continue
            worker, lease = event.data["worker"], (case.job, event.data["token"] - 1)
            witness = workers[worker]
            renewed = witness.renewed(lease, event.at)
            since = max(renewed, _taken(case, event))
            if event.at < renewed + history.ttl - BLUR:
                yield case.job, f"at event {event.seq} its lease was taken {event.at - renewed:.1f} s after a heartbeat"
            elif not witness.was_struck(since, event.at):
                held_up = witness.held_up(since, event.at)
                if held_up < ENOUGH * history.ttl:
                    what = f"which was well: it was held up for {held_up:.1f} s since {event.at - since:.1f} s before"
                    yield case.job, f"at event {event.seq} its lease was taken from {worker}, {what}"


def _taken(case: Case, reaped: Event) -> float:
    """When the lease that was reaped had been given: at a claim or an adoption."""
    given = (
        event.at
        for event in case.events
        if event.seq < reaped.seq and (event.data.get("status") == "running" or event.data.get("lease") == "adopted")
    )
    return max(given, default=reaped.at)


class _Witness:
    """What is known of one worker."""

    def __init__(self, away: Sequence[Interval]) -> None:
        self.beats: list[Beat] = []
        self.lags: list[Lag] = []
        self.faults: list[Fault] = []
        self._away = away

    def renewed(self, lease: tuple[str, int], before: float) -> float:
        """When the last heartbeat that renewed a lease was asked for; minus infinity if none was."""
        found = (beat.asked for beat in self.beats if beat.asked < before and lease in (beat.renewed or ()))
        return max(found, default=float("-inf"))

    def was_struck(self, since: float, until: float) -> bool:
        return any(fault.at <= until and fault.until >= since for fault in self.faults)

    def held_up(self, since: float, until: float) -> float:
        """For how long its process got no turn, or a heartbeat no answer, while the database was there."""
        slow = [(lag.begin, lag.end) for lag in self.lags] + [(beat.asked, beat.answered) for beat in self.beats]
        within = [(max(begin, since), min(end, until)) for begin, end in slow]
        return _length([*within, *self._away]) - _length(self._away)


def _witnesses(history: History) -> Mapping[str, _Witness]:
    away = [(fault.at, fault.until) for fault in history.faults if fault.kind in AWAY]
    found: dict[str, _Witness] = defaultdict(lambda: _Witness(away))
    for beat in history.beats:
        found[beat.worker].beats.append(beat)
    for lag in history.lags:
        found[lag.worker].lags.append(lag)
    for fault in history.faults:
        if fault.kind in CUT_OFF:
            found[fault.target].faults.append(fault)
    return found


def _length(intervals: Iterable[Interval]) -> float:
    """The time that is in at least one of these."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(intervals):
        if stop > max(begin, end):
            total += stop - max(begin, end)
            end = stop
    return total


RULES = (reaps_have_a_reason,)
