"""Did only the holder of a lease write about a job? By the probe in each worker; and did no transaction deadlock?"""

from collections.abc import Iterator, Mapping

from torture.cases import Case
from torture.checks.runs import BLUR
from torture.history import History, Write

Found = Iterator[tuple[str, str]]


def writes_hold_their_lease(history: History, cases: Mapping[str, Case]) -> Found:
    """L4, L6: what landed was written with the token of that time; one that another has followed is stale."""
    for write in history.writes:
        case = cases.get(write.job)
        if case is None or case.record is None or not write.landed:
            continue
        if write.what == "finish" and not any(row.token == write.token and row.end_seq for row in case.attempts):
            yield case.job, f"an end by {write.worker} with token {write.token} landed, and the ledger has none with it"
        elif write.what == "append" and (newer := _newer(case, write)) is not None:
            late = write.asked - newer
            yield case.job, f"events by {write.worker} with token {write.token} landed {late:.1f} s after it was stale"


def _newer(case: Case, write: Write) -> float | None:
    """When a write's token was stale before it was asked for: another was given out, or its attempt had ended."""
    given = [
        event.at for event in case.events if event.type == "lease" and int(event.data.get("token", 0)) > write.token
    ]
    ended = [row.ended for row in case.attempts if row.token >= write.token]
    return min((at for at in (*given, *ended) if at < write.asked - BLUR), default=None)


def nobody_waits_in_a_circle(history: History, cases: Mapping[str, Case]) -> Found:
    """L20: locks have one order, so the database never has to break a deadlock."""
    for line in history.deadlocks:
        yield "the database", line.partition("\n")[0]


RULES = (writes_hold_their_lease, nobody_waits_in_a_circle)
