"""Were stop requests and time limits carried out, whichever worker owned the job?"""

from collections.abc import Iterator, Mapping, Sequence

from torture.cases import APART, TERMINAL, Case
from torture.checks.runs import BLUR
from torture.history import Attempt, Call, Event, Fault, History
from torture.lease_holders import (
    AWAY,
    BUSY,
    ENGINE,
    Interval,
    WorkerActivity,
    activities,
    clipped,
    lease_holdings,
    length,
)

Found = Iterator[tuple[str, str]]

SLACK = 3.0
"""Seconds that a machine with other things to do may take on top of what is promised."""
STOP_GRACE = 10.0
"""What a job has that says nothing else."""


def stops_are_carried(history: History, cases: Mapping[str, Case]) -> Found:
    """C1: after a stop request there is no new attempt until somebody resumes."""
    for case in cases.values():
        stop = None
        for event in case.events:
            if _asks(event):
                stop = event.data.get("kind", "cancel")
            elif event.type == "status" and event.data.get("by") == "resume":
                stop = None
            elif stop and event.type == "status" and event.data["status"] == "queued":
                yield case.job, f"it went back into its line at event {event.seq}, though a {stop} was waiting"
            elif stop and event.type == "status" and event.data["status"] == "running" and "worker" in event.data:
                yield case.job, f"a new attempt began at event {event.seq}, though a {stop} was waiting"


def stops_are_written(history: History, cases: Mapping[str, Case]) -> Found:
    """C1: a stop request that was answered is in the record, unless the job had ended or was about to."""
    for case in cases.values():
        for call in case.called("cancel", "interrupt") if case.record is not None else ():
            if call.answer == "ok" and _lived(case, call) and not any(_follows(event, call) for event in case.events):
                yield case.job, f"call {call.n} ({call.verb}) was answered, and the record knows nothing of it"


def _lived(case: Case, call: Call) -> bool:
    """Whether a job had not ended, and did not end, while a call was under way. One whose attempt ended in a pause is
    interrupted already.
    """
    before = [event.data for event in case.statuses if event.at <= call.sent]
    meanwhile = [event for event in case.statuses if call.sent - BLUR <= event.at <= call.answered + BLUR]
    if not before or meanwhile or before[-1]["status"] in TERMINAL:
        return False
    return not (call.verb == "interrupt" and before[-1]["status"] == "paused" and "cause" in before[-1])


def _follows(event: Event, call: Call) -> bool:
    """Whether an event is what a stop request brings: the request itself, perhaps of an earlier call."""
    return _asks(event) and event.at <= call.answered + BLUR


def _asks(event: Event) -> bool:
    return event.type == "cancel" and event.data.get("cancel") == "requested"


def stops_are_carried_out(history: History, cases: Mapping[str, Case]) -> Found:
    """C1: the owner of a job that is to be stopped stops it, an adopter like the one before.

    Time does not count while nobody owned it, or while its owner was under a fault or held up.
    """
    seen = activities(history)
    for case in cases.values():
        if case.record is None or case.runner not in APART:
            continue
        allowed = _grace(case) + history.ttl
        for row in case.attempts:
            asked = [event.at for event in _during(case, row) if _asks(event)]
            last = max((line.at for line in case.runs.get(row.attempt, [])), default=0.0)
            if asked and (idle := _idle(history, seen, case, asked[0], last)) > allowed:
                yield case.job, f"attempt {row.attempt} was to be stopped, and ran on for {idle:.1f} s"


def _during(case: Case, row: Attempt) -> Sequence[Event]:
    return [event for event in case.events if row.claim_seq <= event.seq <= (row.end_seq or event.seq)]


def _grace(case: Case) -> float:
    policy = case.record.policy if case.record is not None else {}
    return float(policy.get("stop_grace", STOP_GRACE))


def _idle(history: History, seen: Mapping[str, WorkerActivity], case: Case, since: float, until: float) -> float:
    """For how long somebody held a job and could have done something."""
    kept = [
        (fault.at, fault.until)
        for fault in history.faults
        if fault.kind in AWAY | BUSY or (fault.kind in ENGINE and case.runner == "docker")
    ]
    own: list[Interval] = []
    for mine in lease_holdings(case):
        own.append((mine.begin, mine.end))
        witness = seen[mine.worker]
        kept += clipped([*witness.struck(), *witness.slow()], mine.begin, mine.end)
    own, kept = clipped(own, since, until), clipped(kept, since, until)
    return length([*own, *kept]) - length(kept)


def limits_are_kept(history: History, cases: Mapping[str, Case]) -> Found:
    """R3, R8: a child lives for its timeout, however often it is adopted; a silent one for its idle timeout.

    Its supervisor keeps these: whatever befalls workers, servers and the database is no excuse, but to kill that is.
    """
    starved = [fault for fault in history.faults if fault.kind in ("starve", "full disk")]
    for case in cases.values():
        if case.record is None or case.runner not in APART or case.pipeline:
            continue
        for attempt, lines in case.runs.items():
            if case.struck(attempt):
                continue
            last, policy = lines[-1].at, case.record.policy
            said = max(line.said for line in lines)
            heard = min(line.at for line in lines if line.said == said)
            for limit, since in (("timeout", lines[0].at), ("idle_timeout", heard)):
                if policy.get(limit) is not None:
                    over = last - since - float(policy[limit]) - _grace(case) - _within(starved, since, last)
                    if over > SLACK:
                        yield case.job, f"attempt {attempt} lived on for {over + SLACK:.1f} s after its {limit}"


def _within(faults: Sequence[Fault], since: float, until: float) -> float:
    return length(clipped([(fault.at, fault.until) for fault in faults], since, until))


RULES = (stops_are_carried, stops_are_written, stops_are_carried_out, limits_are_kept)
