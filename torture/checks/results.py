"""Are a job's result and artifacts those of its last attempt, and is its usage the sum over all attempts?"""

from collections.abc import Iterator, Mapping

from torture.cases import APART, Case
from torture.checks.streams import TOLD_IN_FULL, has_log_gap
from torture.history import History

Found = Iterator[tuple[str, str]]


def results_are_of_the_end(history: History, cases: Mapping[str, Case]) -> Found:
    """L6, R13, R14: the result and the artifact of a success are those of the attempt that succeeded.

    A job that a person resolved has no end of its own among the attempts, and has the result that it was given.
    """
    for case in _plain(cases):
        row = case.attempts[-1] if case.attempts else None
        if row is None or row.status != "succeeded" or row.end_seq is None or case.record is None:
            continue
        if case.record.result != row.attempt:
            yield case.job, f"attempt {row.attempt} succeeded, and the job's result is {case.record.result!r}"
        left = history.made.get(f"{case.job}/{row.attempt}.{row.token}")
        if left != str(row.attempt):
            yield case.job, f"attempt {row.attempt} succeeded, and its artifact is {left!r}"


def usage_adds_up(history: History, cases: Mapping[str, Case]) -> Found:
    """R11, C7: every attempt reports one run, and the job's usage is the sum of the reports."""
    for case in _plain(cases):
        began = {line.attempt for line in case.lines if line.what == "start"}
        complete = {row.attempt for row in case.attempts if row.cause in TOLD_IN_FULL and row.end_seq is not None}
        used = case.record.usage.get("runs", 0) if case.record is not None else 0
        least = 0 if has_log_gap(case, "stdout") else len(began & complete)
        if not least <= used <= len(began):
            yield case.job, f"{len(began)} attempts ran, {least} of them were heard to the end, and it used {used:g}"


def _plain(cases: Mapping[str, Case]) -> Iterator[Case]:
    """Yield the jobs with child processes that are not pipelines."""
    return (case for case in cases.values() if case.record and case.runner in APART and not case.pipeline)


RULES = (results_are_of_the_end, usage_adds_up)
