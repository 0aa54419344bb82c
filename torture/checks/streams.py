"""Are logs complete and in order, and did followers get every event once, over every cut?"""

from collections.abc import Iterator, Mapping, Sequence

from torture.cases import APART, Case
from torture.history import Attempt, History

Found = Iterator[tuple[str, str]]

TOLD_IN_FULL = frozenset({"exit", "timed_out", "idle_timeout", "cancelled", "interrupted", "out_of_memory"})
"""Ends that were collected: all that was said before them is in the log."""


def logs_are_whole(history: History, cases: Mapping[str, Case]) -> Found:
    """R3, R10: every line of every child is there once, in order, however often it was adopted."""
    for case in cases.values():
        if case.record is None or case.pipeline:
            continue
        for row in case.attempts:
            said = max((line.said for line in case.runs.get(row.attempt, [])), default=0)
            for stream in ("stdout", "stderr") if case.runner in APART else ("stdout",):
                numbers = _said(case, row.attempt, stream)
                whole = numbers == list(range(1, len(numbers) + 1)) or has_log_gap(case, stream)
                if numbers != sorted(set(numbers)) or not whole:
                    yield case.job, f"attempt {row.attempt}, {stream}: the log has the lines {numbers}"
                elif _in_full(case, row) and len(numbers) < said and not has_log_gap(case, stream):
                    yield case.job, f"attempt {row.attempt}, {stream}: {len(numbers)} lines in the log of {said}"


def _in_full(case: Case, row: Attempt) -> bool:
    """Whether all that was said has to be there. A function that was told to stop may end with words unheard."""
    stopped = case.runner == "function" and row.status != "succeeded"
    return row.cause in TOLD_IN_FULL and row.end_seq is not None and not stopped


def has_log_gap(case: Case, stream: str) -> bool:
    """Whether the log says that a part of it could not be kept: its disk was full."""
    return any(
        event.type == "log" and event.data["stream"] == stream and "missing" in event.data for event in case.events
    )


def _said(case: Case, attempt: int, stream: str) -> list[int]:
    """The numbers in the log lines of one attempt: `ATTEMPT out NUMBER`."""
    found = []
    for event in case.events:
        if event.type == "log" and event.data["stream"] == stream:
            for line in event.data["lines"]:
                words = line.split()
                if len(words) == 3 and words[0] == str(attempt):
                    found.append(int(words[2]))
    return found


def followers_miss_nothing(history: History, cases: Mapping[str, Case]) -> Found:
    """E2, E3, E4: after its first event, a stream has every event once; cut and taken up again, nothing is missing."""
    for case in cases.values():
        types = {event.seq: event.type for event in case.events}
        for follow in case.follows:
            seqs = [seq for seq, _ in follow.events]
            if seqs != list(range(follow.after + 1, follow.after + 1 + len(seqs))):
                yield case.job, f"a follower after event {follow.after} got the events {_short(seqs)}"
            elif case.record is not None and any(types.get(seq) != type for seq, type in follow.events):
                yield case.job, f"a follower after event {follow.after} got other events than the record has"
            elif follow.ended and case.record is not None and not _at_an_end(case, follow.after + len(seqs)):
                yield case.job, f"a stream ended in order after event {follow.after + len(seqs)}, in the middle"


def _at_an_end(case: Case, seq: int) -> bool:
    """Whether the job had ended, at this event, as far as was known then; events of its end may follow by a resume."""
    following = next((event for event in case.events if event.seq == seq + 1), None)
    ends = [event for event in case.statuses if event.seq <= seq]
    ended = bool(ends) and ends[-1].data["status"] in ("succeeded", "failed", "timed_out", "cancelled")
    return ended or following is None


def _short(seqs: Sequence[int]) -> str:
    return str(list(seqs)) if len(seqs) < 20 else f"{list(seqs[:10])} … {list(seqs[-10:])}"


RULES = (logs_are_whole, followers_miss_nothing)
