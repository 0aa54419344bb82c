"""Did no job over its budget succeed, and was none with a spent budget resumed?"""

from collections import Counter
from collections.abc import Iterator, Mapping

from torture.cases import Case
from torture.checks.runs import BLUR
from torture.checks.streams import has_log_gap
from torture.history import History
from torture.token_usage import spent_by_a_run

Found = Iterator[tuple[str, str]]


def budgets_are_kept(history: History, cases: Mapping[str, Case]) -> Found:
    """H5: what succeeded by itself is within its budget, by its record and by what its runs are known to use."""
    for case in _budgeted(cases):
        row = case.attempts[-1] if case.attempts else None
        if case.record is None or row is None or row.status != "succeeded" or row.end_seq is None:
            continue
        for name, most in case.record.policy["budget"].items():
            used = case.record.usage.get(name, 0)
            if used > most:
                yield case.job, f"it succeeded, and used {used:g} {name} of {most:g}"
            elif name == "tokens" and (spent := _spent(case)) > most:
                yield case.job, f"it succeeded, and its runs used {spent:g} tokens of {most:g}"


def _spent(case: Case) -> float:
    """Return what the runs used whose end was recorded."""
    if case.submitted is None or has_log_gap(case, "stdout"):
        return 0.0
    whole = {line.attempt for line in case.lines if line.what == "end"}
    heard = {row.attempt for row in case.attempts if row.cause == "exit" and row.end_seq is not None}
    return len(whole & heard) * spent_by_a_run(case.submitted)


def spent_budgets_are_not_resumed(history: History, cases: Mapping[str, Case]) -> Found:
    """H5: a job that has used up its budget is resumed only by a call that raises it."""
    for case in _budgeted(cases):
        used: Counter[str] = Counter()
        for event in case.events:
            if event.type == "usage":
                used.update(event.data)
            elif event.type == "status" and event.data.get("by") == "resume":
                for name, most in _most(case, event.at).items():
                    if used[name] >= most and used[name]:
                        yield (
                            case.job,
                            f"it was resumed at event {event.seq}, with {used[name]:g} {name} of {most:g} used",
                        )


def _most(case: Case, at: float) -> Mapping[str, float]:
    """The highest budget that a job may have had at a time: what it was given first, or by a resume until then."""
    given = [dict((case.submitted or {}).get("budget") or {})]  # type: ignore[call-overload]
    given += [call.given.get("budget") or {} for call in case.called("resume") if call.sent < at + BLUR]
    return {name: max(one.get(name, 0.0) for one in given) for name in given[0]}


def _budgeted(cases: Mapping[str, Case]) -> Iterator[Case]:
    return (case for case in cases.values() if case.record is not None and case.record.policy.get("budget"))


RULES = (budgets_are_kept, spent_budgets_are_not_resumed)
