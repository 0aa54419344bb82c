"""Did every attempt run once, without overlap, with evidence of its end and no process left?"""

from collections import Counter
from collections.abc import Iterator, Mapping

from torture.cases import APART, Case
from torture.history import Attempt, History
from torture.lease_holders import WorkerActivity, activities, lease_holdings

Found = Iterator[tuple[str, str]]

BLUR = 0.1
"""Seconds by which two clocks may differ: the kernel's uptime counts in hundredths, a wall clock is slewed."""
FIRST_SIGN = 5.0
"""Seconds from an attempt's start after which its child has given a sign, however busy the machine is."""
SIGN = 1.0
"""Seconds between two signs of a child, and a little more: it may have lived for that time after its last."""
STARTING = 0.5
"""Seconds after a container's first sign in which its engine may not know yet that it runs: 0.08 were seen."""


def attempts_never_overlap(history: History, cases: Mapping[str, Case]) -> Found:
    """At most one live attempt of a process or a container: no line of an earlier one after a later one's first."""
    for case in _apart(cases):
        last, at = 0, float("-inf")
        for attempt in sorted(case.runs):
            lines = case.runs[attempt]
            if lines[0].at < at:
                yield case.job, f"attempt {attempt} began {at - lines[0].at:.3f} s before the end of attempt {last}"
            if lines[-1].at > at:
                last, at = attempt, lines[-1].at


def attempts_start_once(history: History, cases: Mapping[str, Case]) -> Found:
    """L1, L13, L15, R2, R3: an attempt starts once; a child that outlived its worker is adopted, not started again."""
    for case in _apart(cases):
        ended = {row.attempt: row for row in case.attempts}
        for attempt in {*case.runs, *ended}:
            lines = case.runs.get(attempt, [])
            starts = max(Counter(line.task for line in lines if line.what == "start").values(), default=0)
            row = ended.get(attempt)
            if starts > 1:
                yield case.job, f"attempt {attempt} was started {starts} times"
            elif starts and row is not None and row.cause in ("drained", "start_failed"):
                yield case.job, f"attempt {attempt} ended as {row.cause}, and yet it ran"
            elif not (starts or case.pipeline) and row is not None and _must_have_run(case, row):
                yield case.job, f"attempt {attempt} ended as {row.cause} with {row.exit_code}, and never ran"


def _must_have_run(case: Case, row: Attempt) -> bool:
    """Whether a child came to an end by itself, or was under way for longer than it takes to give its first sign."""
    if row.cause == "exit" and row.exit_code == 0:
        return True
    lived = row.ended - row.started if row.started is not None else 0.0
    return row.cause != "lost" and lived > FIRST_SIGN and not case.struck(row.attempt)


def success_has_its_witness(history: History, cases: Mapping[str, Case]) -> Found:
    """R22: what is called succeeded came to its end, and said so before it was called that."""
    for case in cases.values():
        for row in case.attempts:
            if row.status == "succeeded" and row.end_seq is not None and not case.pipeline:
                ends = [line.at for line in case.runs.get(row.attempt, []) if line.what == "end"]
                if not ends:
                    yield case.job, f"attempt {row.attempt} is called succeeded, and its child never came to its end"
                elif min(ends) > row.ended + BLUR:
                    yield case.job, f"attempt {row.attempt} was called succeeded before its child's end"


def nothing_runs_after_the_end(history: History, cases: Mapping[str, Case]) -> Found:
    """R8, R23, R25, C4: when an attempt has ended, however, nothing of it lives; not even what left its session."""
    for case in _apart(cases):
        for row in case.attempts:
            last = max((line.at for line in case.runs.get(row.attempt, [])), default=0.0)
            late = last - row.ended
            if row.end_seq is not None and late > BLUR:
                yield case.job, f"attempt {row.attempt} gave a sign {late:.3f} s after its end ({row.cause})"
    for process in history.alive:
        owner = cases.get(process.job)
        closed = owner is not None and any(row.attempt == process.attempt for row in owner.attempts)
        if closed or owner is None or owner.record is None:
            yield process.job, f"process {process.pid} of attempt {process.attempt} lives, and the attempt is over"


def losses_have_a_reason(history: History, cases: Mapping[str, Case]) -> Found:
    """R2, R3, R5, L18: a child is called lost only if something killed it; else it is adopted, whatever dies."""
    seen = activities(history)
    for case in _apart(cases):
        for row in case.attempts:
            lost = row.cause == "lost" and row.end_seq is not None
            if lost and not (_may_be_lost(seen, case, row) or _stopped_in_its_start(history, cases, case, row)):
                yield case.job, f"attempt {row.attempt} was called lost, and nobody had touched its child"


def _may_be_lost(seen: Mapping[str, WorkerActivity], case: Case, row: Attempt) -> bool:
    """Whether something was done to its child, or it stopped by itself because nobody beat for it any more (R21).

    Then nobody had when it gave its last sign, or nobody had for longer than it may run without an owner.
    """
    stop_after = case.record.policy.get("stop_after") if case.record is not None else None
    if stop_after is None or case.struck(row.attempt):
        return case.struck(row.attempt)
    last = max((line.at for line in case.runs.get(row.attempt, [])), default=row.ended)
    return max(_unrenewed(seen, case, last) + SIGN, _unrenewed(seen, case, row.ended)) > float(stop_after)


def _unrenewed(seen: Mapping[str, WorkerActivity], case: Case, at: float) -> float:
    """For how long a job's lease had been neither given nor renewed at a time."""
    given = [mine for mine in lease_holdings(case) if mine.begin < at]
    beats = (seen[mine.worker].last_beat(case.job, at) for mine in given)
    return at - max((*beats, *(mine.begin for mine in given)), default=0.0)


def _stopped_in_its_start(history: History, cases: Mapping[str, Case], case: Case, row: Attempt) -> bool:
    """Whether its engine was told to end while it started this container, and knew of no other that ran.

    With live-restore dockerd leaves containers alone if it sees one that runs. If it sees none it ends all, and waits
    for the one that it is starting, to send it SIGTERM. An engine that is killed sends nothing.
    """
    claimed = min((event.at for event in case.events if event.seq == row.claim_seq), default=row.ended)
    begun = min((line.at for line in case.runs.get(row.attempt, ())), default=row.ended)
    return case.runner == "docker" and any(
        claimed < fault.at < min(begun + STARTING, row.ended) and not any(_runs_at(fault.at, cases))
        for fault in history.faults
        if fault.kind == "restart of dockerd"
    )


def _runs_at(at: float, cases: Mapping[str, Case]) -> Iterator[bool]:
    """For each attempt in a container: whether it was well under way at a time."""
    for case in cases.values():
        if case.runner == "docker":
            yield from (lines[0].at + STARTING < at < lines[-1].at - STARTING for lines in case.runs.values())


def _apart(cases: Mapping[str, Case]) -> Iterator[Case]:
    """Jobs whose attempts have children of their own."""
    return (case for case in cases.values() if case.runner in APART)


RULES = (
    attempts_never_overlap,
    attempts_start_once,
    success_has_its_witness,
    nothing_runs_after_the_end,
    losses_have_a_reason,
)
