"""Was a lease taken only from a worker that was gone? By the faults and the probe inside each worker."""

from collections.abc import Iterator, Mapping

from torture.cases import Case
from torture.checks.runs import BLUR
from torture.history import Event, History
from torture.lease_holders import activities

Found = Iterator[tuple[str, str]]

NOTICED = 1.0
"""Seconds within which the harness notices that a process has fallen."""
ENOUGH = 1 / 2
"""The share of a lease's time that a worker lost to a fault or a busy machine, and that explains a reap.

Also after an outage: a reaper then waits for two thirds, and between three tries to beat a worker rests for a sixth.
"""


def reaps_have_a_reason(history: History, cases: Mapping[str, Case]) -> Found:
    """L18: a lease is taken only when it has expired, from a worker that was dead, stopped, cut off, or held up.

    That the database was away is no reason: it was away for those who beat, and they get the time to beat again.
    """
    seen = activities(history)
    for case in cases.values():
        for event in case.events:
            if event.type != "lease" or event.data["lease"] != "reaped":
                continue
            worker, lease = event.data["worker"], (case.job, event.data["token"] - 1)
            witness = seen[worker]
            renewed = witness.renewed(lease, event.at)
            since = max(renewed, _taken(case, event))
            if event.at < renewed + history.ttl - BLUR:
                yield case.job, f"at event {event.seq} its lease was taken {event.at - renewed:.1f} s after a heartbeat"
            elif (held_up := witness.held_up(since, event.at)) < ENOUGH * history.ttl:
                what = f"which was well: it was held up for {held_up:.1f} s since {event.at - since:.1f} s before"
                yield case.job, f"at event {event.seq} its lease was taken from {worker}, {what}"


def _taken(case: Case, reaped: Event) -> float:
    """When the lease that was reaped had been given: at a claim or an adoption."""
    given = (
        event.at
        for event in case.events
        if event.seq < reaped.seq
        and (
            (event.type == "status" and event.data["status"] == "running")  # Tasks have a status, too.
            or event.data.get("lease") == "adopted"
        )
    )
    return max(given, default=reaped.at)


def returns_have_a_reason(history: History, cases: Mapping[str, Case]) -> Found:
    """L19: leases are handed over by their holder, or by a neighbour when the holder's process is gone."""
    seen = activities(history)
    fallen = {process_exit.part: process_exit.at - NOTICED for process_exit in history.exits}
    for case in cases.values():
        for event in case.events:
            if event.type == "lease" and event.data["lease"] == "handed_over":
                worker, token = str(event.data["worker"]), int(event.data["token"])
                gone = seen[worker].was_gone(event.at) or fallen.get(worker, event.at) < event.at
                if not (gone or seen[worker].gave_back(case.job, token - 1)):
                    yield (
                        case.job,
                        f"at event {event.seq} its lease was taken from {worker}, which was there",
                    )


RULES = (reaps_have_a_reason, returns_have_a_reason)
