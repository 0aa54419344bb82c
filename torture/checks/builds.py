"""Did a good build keep its reuse key? A submit with the key gets the newest success, whatever older builds do."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from torture.cases import Case
from torture.checks.runs import BLUR
from torture.history import Call, History

Found = Iterator[tuple[str, str]]


def good_builds_keep_their_key(history: History, cases: Mapping[str, Case]) -> Found:
    """D6: while the newest build of a key is a success, a submit with the key gets it, or one that succeeded later.

    An older build that is resumed does not take its place, neither while it runs nor when it has failed again.
    """
    builds: dict[str, list[Case]] = defaultdict(list)
    asks: dict[str, list[Call]] = defaultdict(list)
    for case in cases.values():
        if (key := _key(case)) is not None:
            builds[key].append(case)
    for call in history.calls:
        if call.verb == "submit" and len(call.jobs) == 1 and call.jobs[0].get("reuse_key") is not None:
            asks[call.jobs[0]["reuse_key"]].append(call)
    for key, calls in asks.items():
        for call in calls:
            good = _good(builds[key], call)
            if good is None or call.answer != "ok" or call.repeats is not None or call.jobs[0].get("rebuild"):
                continue
            (answer,) = call.ids
            if answer not in _allowed(builds[key], good, call):
                yield answer, f"call {call.n} asked for {key} and got it, though job {good.job} had been built for that"


def _key(case: Case) -> str | None:
    """The reuse key that a job was made for; of a deleted one it is known by the call."""
    found = case.record.reuse_key if case.record is not None else (case.submitted or {}).get("reuse_key")
    return None if found is None else str(found)


def _good(builds: Sequence[Case], call: Call) -> Case | None:
    """The build that stood for a key during a call, if there is no doubt: the newest of all, a success, and to stay.

    When a deleted build was made is not known: it may have been the newest one until somebody deleted it. A build that
    a person resolved does not take the key back from an older one that was resumed before.
    """
    mine = set(call.ids) if not call.reused else set()
    made = {case.job: _made(case) for case in builds if case.job not in mine}
    newest = max((case for case in builds if made.get(case.job, math.inf) < call.answered + BLUR),
                 key=lambda case: made[case.job], default=None)  # fmt: skip
    if newest is None or newest.record is None or newest.called("delete", "resolve"):
        return None
    unsure = any(case.record is None and _answered(case) > made[newest.job] - BLUR for case in builds)
    return newest if _succeeded(newest) < call.sent - BLUR and not unsure else None


def _allowed(builds: Sequence[Case], good: Case, call: Call) -> set[str]:
    """A good build, and what succeeded after it, before a call was answered: an old one that was resumed may have."""
    return {case.job for case in builds if _succeeded(good) <= _succeeded(case) < call.answered + BLUR}


def _made(case: Case) -> float:
    """When a build was made, or, of a deleted one, the earliest time at which it may have been."""
    if case.statuses:
        return case.statuses[0].at
    return min((call.sent for call in case.calls if call.verb == "submit"), default=-math.inf)


def _answered(case: Case) -> float:
    return max((call.answered for call in case.calls if call.verb == "submit"), default=-math.inf)


def _succeeded(case: Case) -> float:
    return next((event.at for event in case.statuses if event.data["status"] == "succeeded"), math.inf)


RULES = (good_builds_keep_their_key,)
