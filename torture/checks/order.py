"""Was order kept? Lanes, dependencies, one builder per reuse key."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from torture.cases import APART, TERMINAL, Case, Span, overlaps
from torture.history import History

Found = Iterator[tuple[str, str]]

STILL, PASSED = 2.0, 5
"""Seconds that a lane may stand still, and how many may pass who waits in it meanwhile."""


def lanes_hold_one_job(history: History, cases: Mapping[str, Case]) -> Found:
    """N1, N2: from its claim until its end is accepted, a job has its lane for itself; also by its children's word."""
    for laned in _by_lane(cases).values():
        for first, second in overlaps([span for case in laned for span in _holding(case)]):
            yield second.job, f"it was claimed while job {first.job} held their lane"
        children = [
            Span(lines[0].at, lines[-1].at, case.job)
            for case in laned
            if case.runner in APART
            for lines in case.runs.values()
        ]
        for first, second in overlaps(children):
            yield second.job, f"its child began before the end of job {first.job}, which is in the same lane"


def _by_lane(cases: Mapping[str, Case]) -> Mapping[str, list[Case]]:
    lanes: dict[str, list[Case]] = defaultdict(list)
    for case in cases.values():
        if case.record is not None and case.record.lane is not None:
            lanes[case.record.lane].append(case)
    return lanes


def _holding(case: Case) -> Iterator[Span]:
    """When a job held or blocked its lane: from a claim until it succeeds, is cancelled, resumed or dismissed.

    A retry in backoff keeps the lane. A resumed job waits in line again.
    """
    begin: float | None = None
    for event in case.events:
        status = event.data.get("status") if event.type == "status" else None
        dismissed = event.type == "audit" and event.data.get("action") == "dismiss"
        if status == "running" and begin is None:
            begin = event.at
        resumed = status in ("queued", "pending") and (event.data.get("by") == "resume" or "revived_by" in event.data)
        if begin is not None and (dismissed or resumed or status in ("succeeded", "cancelled")):
            yield Span(begin, event.at, case.job)
            begin = None
    if begin is not None:
        yield Span(begin, math.inf, case.job)


def lanes_keep_order(history: History, cases: Mapping[str, Case]) -> Found:
    """N1: of two jobs that were accepted one after the other, the first starts first, unless it was held up.

    Delayed jobs, dependants and held ones stand in line when they are ready; who was resumed or revived may be passed.
    """
    for laned in _by_lane(cases).values():
        plain = list(_told(laned))
        for earlier, (_, answered) in plain:
            for later, (sent, _) in plain:
                if answered < sent and _first_claim(later) < _first_claim(earlier) < math.inf:
                    yield earlier.job, f"job {later.job} was accepted later in its lane and started before it"


def _in_line(case: Case) -> bool:
    asked = case.submitted or {}
    back = any(event.data.get("by") in ("resume", "release") or "revived_by" in event.data for event in case.statuses)
    return bool(asked) and not back and not (asked.get("available_at") or asked.get("needs") or asked.get("hold"))


def _accepted(case: Case) -> tuple[float, float] | None:
    """When the call that made it was sent and answered, if that is certain: not one that was repeated."""
    calls = [call for call in case.calls if call.verb == "submit"]
    if len(calls) != 1 or calls[0].answer != "ok" or calls[0].reused:
        return None
    return calls[0].sent, calls[0].answered


def _first_claim(case: Case) -> float:
    return next((event.at for event in case.statuses if event.data["status"] == "running"), math.inf)


def lanes_do_not_stand_still(history: History, cases: Mapping[str, Case]) -> Found:
    """N2: the first in a free lane is not passed by others that came later, run alike, and are no more urgent.

    They were claimed, so there was room; nothing else than its lane can have kept it.
    """
    others = [(_first_claim(case), sent, case) for case, (sent, _) in _told(cases.values())]
    deleted: dict[str, list[Case]] = defaultdict(list)
    for case in cases.values():
        if case.record is None and case.submitted is not None:
            deleted[str(case.submitted.get("lane"))].append(case)
    for lane, laned in _by_lane(cases).items():
        for case, (_, answered) in _told(laned):
            claim = _first_claim(case)
            held_until = [
                span.end for other in laned if other is not case for span in _holding(other) if span.begin < claim
            ]
            gone = [_deleted_at(other) for other in deleted.get(str(lane), ()) if _sent(other) < claim]
            ready = max([answered, *held_until, *gone])
            passed = [
                other for at, sent, other in others
                if sent > ready + STILL and at < claim - STILL and claim < math.inf and _alike(case, other)
            ]  # fmt: skip
            if len(passed) >= PASSED:
                yield case.job, f"its lane was free for {claim - ready:.1f} s, in which {len(passed)} others passed it"


def _deleted_at(case: Case) -> float:
    """Until when a job that was deleted may have blocked its lane: it has no record that would tell."""
    deletes = [call for call in case.calls if call.verb == "delete"]
    return max((call.answered if call.answer == "ok" else math.inf for call in deletes), default=math.inf)


def _sent(case: Case) -> float:
    return min((call.sent for call in case.calls), default=-math.inf)


def _told(cases: Iterable[Case]) -> Iterator[tuple[Case, tuple[float, float]]]:
    """Jobs that stand in line from the moment they are accepted, with the times of the call that made them."""
    for case in cases:
        if _in_line(case) and (accepted := _accepted(case)) is not None:
            yield case, accepted


def _alike(case: Case, other: Case) -> bool:
    mine, theirs = case.submitted or {}, other.submitted or {}
    return (
        case.runner == other.runner
        and case.pipeline == other.pipeline
        and mine.get("queue") == theirs.get("queue")
        and int(str(theirs.get("priority", 0))) <= int(str(mine.get("priority", 0)))
    )


def needs_come_first(history: History, cases: Mapping[str, Case]) -> Found:
    """N6: a dependant never ran before all that it needs had succeeded."""
    for case in cases.values():
        claim = _first_claim(case)
        for need in case.record.needs if case.record is not None and claim < math.inf else ():
            other = cases.get(need)
            if other is None or other.record is None:
                continue
            done = next((event.at for event in other.statuses if event.data["status"] == "succeeded"), math.inf)
            if claim < done:
                yield case.job, f"it was claimed before job {need}, which it needs, had succeeded"


def one_builder_per_key(history: History, cases: Mapping[str, Case]) -> Found:
    """N7: of the jobs with one reuse key, one is live at a time. Whether one is built again: see builds.py."""
    keys: dict[str, list[Case]] = defaultdict(list)
    for case in cases.values():
        if case.record is not None and case.record.reuse_key is not None:
            keys[case.record.reuse_key].append(case)
    for key, builders in keys.items():
        for first, second in overlaps([span for case in builders for span in _live(case)]):
            yield second.job, f"it was live for the key {key} while job {first.job} was"


def _live(case: Case) -> Iterator[Span]:
    begin: float | None = None
    for event in case.statuses:
        live = event.data["status"] not in TERMINAL
        if live and begin is None:
            begin = event.at
        elif not live and begin is not None:
            yield Span(begin, event.at, case.job)
            begin = None
    if begin is not None:
        yield Span(begin, math.inf, case.job)


def no_gate_was_stuck(history: History, cases: Mapping[str, Case]) -> Found:
    """N2, N6: no lane or dependant was stuck until a duty repaired it."""
    for line in history.mended:
        yield next((case.job for case in cases.values() if _is_named(case, line)), ""), line


def _is_named(case: Case, line: str) -> bool:
    """Whether a line tells of a job, or of the lane that it stands in."""
    return case.job in line or (case.record is not None and f"{case.record.lane!r})" in line)


RULES = (
    no_gate_was_stuck,
    lanes_hold_one_job,
    lanes_keep_order,
    lanes_do_not_stand_still,
    needs_come_first,
    one_builder_per_key,
)
