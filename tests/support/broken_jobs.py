"""Good histories, broken by hand: jobs, calls, stops, events and what readers see of them."""

import msgspec
from torture.checks.exits import NO_DATABASE
from torture.history import Event, Fault

from tests.support.breakages import Breakages
from tests.support.hand_made_histories import HandMadeHistory

BROKEN_JOBS = Breakages[HandMadeHistory]()


@BROKEN_JOBS.breaks("accepted_jobs_are_there", "an accepted job is gone")
def missing(example: HandMadeHistory) -> None:
    for part in (example.history.records, example.history.events, example.history.attempts):
        del part["plain"]


@BROKEN_JOBS.breaks("accepted_jobs_are_there", "an accepted job is gone, and a delete of it finds nothing")
def _missing_for_a_delete(example: HandMadeHistory) -> None:
    missing(example)
    example.ask("delete", "plain", answer="refused", error="404 no job plain")


@BROKEN_JOBS.breaks("accepted_jobs_are_there", "an accepted job is gone, and a delete of it was refused")
def _refused_delete(example: HandMadeHistory) -> None:
    missing(example)
    example.ask("delete", "plain", answer="refused", error="409 blocked: job plain is running")


@BROKEN_JOBS.breaks("accepted_jobs_are_there", "a job is said not to be there, and is")
def _unseen(example: HandMadeHistory) -> None:
    example.ask("cancel", "plain", answer="refused", error="NotFound('no job plain')")


@BROKEN_JOBS.breaks("accepted_jobs_are_there", "a job was not there before somebody deleted it")
def _gone_before(example: HandMadeHistory) -> None:
    missing(example)
    example.ask("cancel", "plain", answer="refused", error="404 no job plain")
    example.at += 1
    example.ask("delete", "plain", answer="ok")


@BROKEN_JOBS.breaks("processes_exit_only_when_told", "a worker that nobody struck is gone")
def _fallen(example: HandMadeHistory) -> None:
    example.process_exit("w3", 1)


@BROKEN_JOBS.breaks("processes_exit_only_when_told", "a worker was killed, and not by us")
def _killed_by_others(example: HandMadeHistory) -> None:
    example.process_exit("w3", -9)


@BROKEN_JOBS.breaks("processes_exit_only_when_told", "a worker that was told to leave ended with an error")
def _left_badly(example: HandMadeHistory) -> None:
    example.history.faults.append(Fault(kind="end worker", at=1.0, until=2.0, target="w3"))
    example.process_exit("w3", 1)


@BROKEN_JOBS.breaks("processes_exit_only_when_told", "a worker said that the database is away, and it was there")
def _no_reason(example: HandMadeHistory) -> None:
    example.at += 100
    example.process_exit("w3", NO_DATABASE)


@BROKEN_JOBS.breaks("calls_are_done_whole_and_once", "a call that was repeated made a second job")
def _second(example: HandMadeHistory) -> None:
    example.job("second")
    example.change_record("second", labels={"call": "0"})


@BROKEN_JOBS.breaks("calls_are_done_whole_and_once", "the same key was answered with two jobs")
def _two_answers(example: HandMadeHistory) -> None:
    example.repeat_call(0, ("first",))


@BROKEN_JOBS.breaks("calls_are_done_whole_and_once", "half of a bulk is there")
def _half(example: HandMadeHistory) -> None:
    call = example.history.calls[0]
    example.history.calls[0] = msgspec.structs.replace(call, jobs=(*call.jobs, *call.jobs), answer="unknown")


@BROKEN_JOBS.breaks("every_job_ended", "a job waits for ever")
def _waits(example: HandMadeHistory) -> None:
    example.change_record("plain", status="running", finished=None)


@BROKEN_JOBS.breaks("moves_are_legal", "a job ended twice")
def _ended_twice(example: HandMadeHistory) -> None:
    example.add_event("plain", "status", status="failed")
    example.change_record("plain", status="failed")


@BROKEN_JOBS.breaks("moves_are_legal", "a job came back after its end, and nobody had asked for it")
def _came_back(example: HandMadeHistory) -> None:
    example.change_event("plain", 8, status="failed")
    for status in ("queued", "running", "succeeded"):
        example.add_event("plain", "status", status=status)


@BROKEN_JOBS.breaks("moves_are_legal", "a job that had failed has succeeded, and nobody had resolved it")
def _healed(example: HandMadeHistory) -> None:
    example.change_event("plain", 8, status="failed")
    example.add_event("plain", "status", status="succeeded")


@BROKEN_JOBS.breaks("persons_are_obeyed_once", "a job was resumed, and nobody had asked for it")
def _resumed_unasked(example: HandMadeHistory) -> None:
    example.change_event("plain", 8, status="failed")
    example.add_event("plain", "status", status="queued", by="resume")


@BROKEN_JOBS.breaks("persons_are_obeyed_once", "a resolve that was asked for once was done twice")
def _resolved_twice(example: HandMadeHistory) -> None:
    example.ask("resolve", "plain", answer="ok")
    example.change_event("plain", 8, status="failed", resolved=True)
    example.add_event("plain", "status", status="succeeded", resolved=True)


@BROKEN_JOBS.breaks("history_has_no_gap", "an event is missing")
def _gap(example: HandMadeHistory) -> None:
    del example.history.events["plain"][2]


@BROKEN_JOBS.breaks("history_has_no_gap", "an event is there twice")
def _twice(example: HandMadeHistory) -> None:
    example.history.events["plain"].insert(2, example.history.events["plain"][2])


@BROKEN_JOBS.breaks("history_has_no_gap", "the record differs from its last event")
def _differs(example: HandMadeHistory) -> None:
    example.change_record("plain", status="cancelled")


@BROKEN_JOBS.breaks("times_are_in_order", "finished before it was requested")
def _early(example: HandMadeHistory) -> None:
    example.change_record("plain", finished=1.0)


@BROKEN_JOBS.breaks("times_are_in_order", "started without a claim")
def _unclaimed(example: HandMadeHistory) -> None:
    example.change_record("plain", started=None)


@BROKEN_JOBS.breaks("times_are_in_order", "an event is earlier than the one before it")
def _back_in_time(example: HandMadeHistory) -> None:
    event = example.history.events["plain"][5]
    example.history.events["plain"][5] = msgspec.structs.replace(event, at=event.at - 5)


@BROKEN_JOBS.breaks("stops_are_carried", "a cancel was forgotten at a claim")
def _forgotten(example: HandMadeHistory) -> None:
    events = example.history.events["plain"]
    events[0] = msgspec.structs.replace(events[0], type="cancel", data={"cancel": "requested", "kind": "cancel"})


@BROKEN_JOBS.breaks("stops_are_carried", "a job that is to be stopped goes back into its line")
def _back_in_line(example: HandMadeHistory) -> None:
    example.add_event("plain", "cancel", cancel="requested", kind="cancel")
    example.add_event("plain", "status", status="queued")


def ask_to_stop(example: HandMadeHistory, *, at: float, until: float) -> None:
    """Let `plain` be told to stop at this second of its time, and end at that one."""
    begin = example.history.records["plain"].requested
    events = [event for event in example.history.events["plain"] if event.type != "log"]
    asked = Event(seq=0, at=begin + at, type="cancel", data={"cancel": "requested", "kind": "cancel"})
    events[-1] = msgspec.structs.replace(events[-1], at=begin + until + 0.5)
    events = sorted([*events, asked], key=lambda event: event.at)
    example.history.events["plain"] = [msgspec.structs.replace(event, seq=n) for n, event in enumerate(events, 1)]
    example.change_record("plain", seq=len(events), finished=begin + until + 0.5)
    example.history.attempts["plain"][0] = msgspec.structs.replace(
        example.history.attempts["plain"][0], end_seq=len(events), ended=begin + until + 0.5
    )
    example.history.lines.append(example.line("plain", "tick", begin - example.at + until, said=3))
    example.history.follows = [follow for follow in example.history.follows if follow.job != "plain"]


@BROKEN_JOBS.breaks("stops_are_carried_out", "an adopter forgot a cancel")
def _not_stopped(example: HandMadeHistory) -> None:
    ask_to_stop(example, at=3.0, until=14.0)


@BROKEN_JOBS.breaks("stops_are_carried_out", "an owner did not hear a cancel")
def _not_heard(example: HandMadeHistory) -> None:
    ask_to_stop(example, at=6.0, until=14.0)


@BROKEN_JOBS.breaks("stops_are_written", "a cancel was answered, and is in no record")
def _unwritten(example: HandMadeHistory) -> None:
    example.ask("cancel", "plain", answer="ok")
    begin = example.history.records["plain"].requested
    example.history.calls[-1] = msgspec.structs.replace(example.history.calls[-1], sent=begin + 3, answered=begin + 3.1)


@BROKEN_JOBS.breaks("limits_are_kept", "an adopter restarted a timeout")
def _counted_anew(example: HandMadeHistory) -> None:
    example.change_record("plain", policy={"stop_grace": 0.5, "timeout": 2.0})


@BROKEN_JOBS.breaks("limits_are_kept", "a child that says nothing lives on")
def _silent(example: HandMadeHistory) -> None:
    begin = example.history.records["plain"].requested
    example.change_record("plain", policy={"stop_grace": 0.5, "idle_timeout": 1.0})
    example.history.lines.append(example.line("plain", "tick", begin - example.at + 13, said=3))


@BROKEN_JOBS.breaks("logs_are_whole", "a line is there twice")
def _repeated_line(example: HandMadeHistory) -> None:
    example.change_event("plain", 6, lines=["1 out 2", "1 out 3"])


@BROKEN_JOBS.breaks("logs_are_whole", "the last line is lost")
def _lost_line(example: HandMadeHistory) -> None:
    example.change_event("plain", 6, lines=[])


@BROKEN_JOBS.breaks("followers_miss_nothing", "an event was skipped at a cut")
def _skipped(example: HandMadeHistory) -> None:
    example.history.follows[1].events = example.history.follows[1].events[1:]


@BROKEN_JOBS.breaks("followers_miss_nothing", "an event came twice")
def _came_twice(example: HandMadeHistory) -> None:
    example.history.follows[0].events = [*example.history.follows[0].events, example.history.follows[0].events[-1]]


@BROKEN_JOBS.breaks("followers_miss_nothing", "a stream ended in the middle")
def _ended_early(example: HandMadeHistory) -> None:
    example.history.follows[0].ended = True
