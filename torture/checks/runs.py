"""Did every attempt run as it should? Once, alone, with a witness for its end, nothing of it alive afterwards."""

from collections import Counter
from collections.abc import Iterator, Mapping

from torture.cases import APART, Case
from torture.history import Attempt, History

Found = Iterator[tuple[str, str]]

BLUR = 0.1
"""Seconds by which two clocks may differ: the kernel's uptime counts in hundredths, a wall clock is slewed."""
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
            begun = {(line.task, line.pid, line.token) for line in lines if line.what == "start"}
            starts = max(Counter(task for task, _, _ in begun).values(), default=0)
            row = ended.get(attempt)
            if starts > 1:
                yield case.job, f"attempt {attempt} was started {starts} times"
            elif starts and row is not None and row.cause in ("drained", "start_failed"):
                yield case.job, f"attempt {attempt} ended as {row.cause}, and yet it ran"
            elif not (starts or case.pipeline) and row is not None and row.cause == "exit" and row.exit_code == 0:
                yield case.job, f"attempt {attempt} ended with exit code 0, and never ran"


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
    for case in _apart(cases):
        for row in case.attempts:
            lost = row.cause == "lost" and row.end_seq is not None
            if lost and not (_may_be_lost(case, row) or _stopped_in_its_start(history, cases, case, row)):
                yield case.job, f"attempt {row.attempt} was called lost, and nobody had touched its child"


def _may_be_lost(case: Case, row: Attempt) -> bool:
    stops_by_itself = case.record is not None and case.record.policy.get("stop_after") is not None
    return stops_by_itself or case.struck(row.attempt)


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
