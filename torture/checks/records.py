"""Is the record complete and consistent? No loss, no duplicate, only legal moves, growing tokens."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from torture.cases import TERMINAL, Case, may_be_done
from torture.history import Attempt, Call, Event, History

Found = Iterator[tuple[str, str]]

MAY_FOLLOW = {
    "": {"queued", "pending"},
    "pending": {"queued", "cancelled", "failed"},
    "queued": {"running", "cancelled", "failed", "timed_out"},
    "running": {"succeeded", "failed", "timed_out", "cancelled", "paused", "queued"},
    "paused": {"queued", "succeeded", "cancelled", "running"},
    "failed": {"queued", "pending", "succeeded"},
    "timed_out": {"queued", "succeeded"},
    "cancelled": {"queued"},
    "succeeded": set[str](),
}
"""Which status may come after which."""
NEEDS_A_WORD = {
    (before, after)
    for before in ("paused", "failed", "timed_out", "cancelled")
    for after in ("queued", "pending", "succeeded")
}
"""Moves out of an end, or out of a pause, that nothing makes by itself."""


def accepted_jobs_are_there(history: History, cases: Mapping[str, Case]) -> Found:
    """J1: what was answered is in the database, for everybody who asks, unless somebody has asked to delete it.

    Nothing else takes a job away here: retention is a matter of days.
    """
    for case in cases.values():
        accepted = [call for call in case.calls if call.verb == "submit" and call.answer == "ok"]
        deletes = case.called("delete")
        if accepted and case.record is None and not deletes:
            yield case.job, f"call {accepted[0].n} was answered with it, and it is not in the database"
        for call in case.calls if accepted else ():
            if _is_not_there(call) and not any(delete.sent < call.answered for delete in deletes):
                yield case.job, f"call {call.n} ({call.verb}) was told that it is not there; nobody had deleted it"


def _is_not_there(call: Call) -> bool:
    return call.verb != "submit" and call.answer == "refused" and call.error.startswith(("404", "NotFound"))


def calls_are_done_whole_and_once(history: History, cases: Mapping[str, Case]) -> Found:
    """J12, J13: a submit made all of its jobs or none, and a repeat of it made no second ones."""
    made: dict[str, list[str]] = defaultdict(list)
    for record in history.records.values():
        made[record.labels.get("call", "")].append(record.id)
    deleted = {job for call in history.calls if call.verb == "delete" and may_be_done(call) for job in call.ids}
    for calls in _same_calls(history.calls):
        first = calls[0]
        there = made[str(first.n)]
        joins = any(job.get("reuse_key") for job in first.jobs)
        whole = len(there) == len(first.jobs) or joins or any(job in deleted for call in calls for job in call.ids)
        if len(there) > len(first.jobs):
            yield there[-1], f"call {first.n} asked for {len(first.jobs)} jobs and made {len(there)}"
        elif there and not whole:
            yield there[0], f"call {first.n} asked for {len(first.jobs)} jobs and made only {len(there)}"
        answers = {tuple(call.ids) for call in calls if call.answer == "ok"}
        if len(answers) > 1:
            yield calls[-1].ids[0], f"call {first.n} was repeated with its key and answered differently: {answers}"


def _same_calls(calls: Sequence[Call]) -> list[list[Call]]:
    """The submits, each with its repeats."""
    same: dict[int, list[Call]] = {}
    for call in calls:
        if call.verb == "submit":
            same.setdefault(call.n if call.repeats is None else call.repeats, []).append(call)
    return list(same.values())


def every_job_ended(history: History, cases: Mapping[str, Case]) -> Found:
    """Nothing is lost: when all is quiet, every job has ended."""
    for case in cases.values():
        if case.record is not None and case.record.status not in TERMINAL:
            yield case.job, f"it is {case.record.status} though nothing more happens"


def moves_are_legal(history: History, cases: Mapping[str, Case]) -> Found:
    """J4: no status comes after one that it cannot follow; and there is one end per resume, revival or resolve."""
    for case in cases.values():
        before = ""
        for event in case.statuses:
            status = event.data["status"]
            deleted_twice = status == before == "cancelled" and case.called("delete")
            if status not in MAY_FOLLOW[before] and not deleted_twice:
                yield case.job, f"event {event.seq} says {status}, after {before or 'nothing'}"
            elif not deleted_twice and (before, status) in NEEDS_A_WORD and not _has_a_word(event):
                yield case.job, f"event {event.seq} says {status}, after {before}, and nobody asked for it"
            before = status


def _has_a_word(event: Event) -> bool:
    """Whether an event says who brought back what had ended or stood still: a person, a need, an adopter."""
    return event.data.get("by") == "resume" or bool({"revived_by", "resolved"} & set(event.data))


def persons_are_obeyed_once(history: History, cases: Mapping[str, Case]) -> Found:
    """J4: a job is resumed or resolved no more often than somebody asked for it."""
    for case in cases.values():
        done = {
            "resume": sum(event.data.get("by") == "resume" for event in case.statuses),
            "resolve": sum("resolved" in event.data for event in case.statuses),
        }
        for verb, count in done.items():
            if count > (asked := len(case.called(verb))):
                yield case.job, f"{verb} was done {count} times, and asked for {asked} times"


def history_has_no_gap(history: History, cases: Mapping[str, Case]) -> Found:
    """E1, J2: `seq` counts from 1 without a gap, and the last status among the events is the job's."""
    for case in cases.values():
        if case.record is None:
            continue
        seqs = [event.seq for event in case.events]
        if seqs != list(range(1, case.record.seq + 1)):
            odd = sorted(set(range(1, case.record.seq + 1)) ^ set(seqs)) or "some come twice"
            yield case.job, f"its events do not count from 1 to {case.record.seq}: {odd}"
        elif case.statuses[-1].data["status"] != case.record.status:
            yield case.job, f"it is {case.record.status}, and its last event says {case.statuses[-1].data['status']}"


def times_are_in_order(history: History, cases: Mapping[str, Case]) -> Found:
    """J3: requested, started, finished, in this order; started only by a claim, finished only at an end."""
    for case in cases.values():
        record = case.record
        if record is None:
            continue
        known = [at for at in (record.requested, record.started, record.finished) if at is not None]
        claimed = any(event.data["status"] == "running" for event in case.statuses)
        ends = record.status in TERMINAL
        if known != sorted(known) or claimed != (record.started is not None) or ends != (record.finished is not None):
            yield case.job, f"requested {record.requested}, started {record.started}, finished {record.finished}"
        if any(later.at < earlier.at for earlier, later in zip(case.events, case.events[1:], strict=False)):
            yield case.job, "the times of its events go back"


def tokens_grow(history: History, cases: Mapping[str, Case]) -> Found:
    """L4: every change of ownership raises the token, and nothing is written with one that is older than another."""
    for case in cases.values():
        token = 0
        for seq, what, said in sorted(_tokens(case.events, case.attempts), key=lambda step: step[:2]):
            if what == "claim":
                token += 1
            elif what == "end" and said < token:
                yield case.job, f"an attempt ended at event {seq} with token {said}, when {token} had been given out"
            elif what != "end" and said <= token:
                yield case.job, f"event {seq} ({what}) has token {said}, when {token} had been given out"
            token = max(token, said)
        starts: dict[int, int] = {}
        for line in case.lines:
            starts.setdefault(line.attempt, line.token)
        for earlier, later in zip(sorted(starts), sorted(starts)[1:], strict=False):
            if starts[later] <= starts[earlier]:
                yield case.job, f"attempt {later} ran with token {starts[later]}, attempt {earlier} with a higher one"


def _tokens(events: Sequence[Event], attempts: Sequence[Attempt]) -> Iterator[tuple[int, str, int]]:
    """Each change of ownership and each end, with its place in the history: (seq, what, token). A claim tells none."""
    for event in events:
        if event.type == "lease" and "token" in event.data:
            yield event.seq, str(event.data["lease"]), int(event.data["token"])
        elif event.type == "status" and event.data["status"] == "running" and "worker" in event.data:
            yield event.seq, "claim", 0
    for row in attempts:
        if row.end_seq is not None:
            yield row.end_seq, "end", row.token


def attempts_are_ordinals(history: History, cases: Mapping[str, Case]) -> Found:
    """L13: attempts count from 1, none is used again, and whatever ran is in the ledger."""
    for case in cases.values():
        if case.record is None:
            continue
        rows = [row.attempt for row in case.attempts]
        if rows != list(range(1, len(rows) + 1)):
            yield case.job, f"its ledger has the attempts {rows}"
        unknown = sorted(set(case.runs) - set(rows))
        if unknown and case.record.status in TERMINAL:
            yield case.job, f"attempts {unknown} ran, and the ledger does not know them"


RULES = (
    accepted_jobs_are_there,
    calls_are_done_whole_and_once,
    every_job_ended,
    moves_are_legal,
    persons_are_obeyed_once,
    history_has_no_gap,
    times_are_in_order,
    tokens_grow,
    attempts_are_ordinals,
)
