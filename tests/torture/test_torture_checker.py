"""The checker of torture runs is checked: a good history passes, and each rule is broken by hand once."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from torture.checker import RULES, check
from torture.checks import budgets, builds, deletes, pipelines
from torture.checks.exits import NO_DATABASE
from torture.history import Event, Fault, History, SurvivingProcess, Write

from tests.support.hand_made_histories import HandMadeHistory, good

Breakage = Callable[[HandMadeHistory], None]
BROKEN: dict[str, list[tuple[str, Breakage]]] = {}


def breaks(rule: str, what: str) -> Callable[[Breakage], Breakage]:
    """Register a way to break a good example, and the rule that must see it."""

    def register(make: Breakage) -> Breakage:
        BROKEN.setdefault(rule, []).append((what, make))
        return make

    return register


@breaks("accepted_jobs_are_there", "an accepted job is gone")
def _missing(example: HandMadeHistory) -> None:
    for part in (example.history.records, example.history.events, example.history.attempts):
        del part["plain"]


@breaks("accepted_jobs_are_there", "an accepted job is gone, and a delete of it finds nothing")
def _missing_for_a_delete(example: HandMadeHistory) -> None:
    _missing(example)
    example.ask("delete", "plain", answer="refused", error="404 no job plain")


@breaks("accepted_jobs_are_there", "an accepted job is gone, and a delete of it was refused")
def _refused_delete(example: HandMadeHistory) -> None:
    _missing(example)
    example.ask("delete", "plain", answer="refused", error="409 blocked: job plain is running")


@breaks("accepted_jobs_are_there", "a job is said not to be there, and is")
def _unseen(example: HandMadeHistory) -> None:
    example.ask("cancel", "plain", answer="refused", error="NotFound('no job plain')")


@breaks("accepted_jobs_are_there", "a job was not there before somebody deleted it")
def _gone_before(example: HandMadeHistory) -> None:
    _missing(example)
    example.ask("cancel", "plain", answer="refused", error="404 no job plain")
    example.at += 1
    example.ask("delete", "plain", answer="ok")


@breaks("processes_exit_only_when_told", "a worker that nobody struck is gone")
def _fallen(example: HandMadeHistory) -> None:
    example.process_exit("w3", 1)


@breaks("processes_exit_only_when_told", "a worker was killed, and not by us")
def _killed_by_others(example: HandMadeHistory) -> None:
    example.process_exit("w3", -9)


@breaks("processes_exit_only_when_told", "a worker that was told to leave ended with an error")
def _left_badly(example: HandMadeHistory) -> None:
    example.history.faults.append(Fault(kind="end worker", at=1.0, until=2.0, target="w3"))
    example.process_exit("w3", 1)


@breaks("processes_exit_only_when_told", "a worker said that the database is away, and it was there")
def _no_reason(example: HandMadeHistory) -> None:
    example.at += 100
    example.process_exit("w3", NO_DATABASE)


@breaks("calls_are_done_whole_and_once", "a call that was repeated made a second job")
def _second(example: HandMadeHistory) -> None:
    example.job("second")
    example.change_record("second", labels={"call": "0"})


@breaks("calls_are_done_whole_and_once", "the same key was answered with two jobs")
def _two_answers(example: HandMadeHistory) -> None:
    example.repeat_call(0, ("first",))


@breaks("calls_are_done_whole_and_once", "half of a bulk is there")
def _half(example: HandMadeHistory) -> None:
    call = example.history.calls[0]
    example.history.calls[0] = msgspec.structs.replace(call, jobs=(*call.jobs, *call.jobs), answer="unknown")


@breaks("every_job_ended", "a job waits for ever")
def _waits(example: HandMadeHistory) -> None:
    example.change_record("plain", status="running", finished=None)


@breaks("moves_are_legal", "a job ended twice")
def _ended_twice(example: HandMadeHistory) -> None:
    example.add_event("plain", "status", status="failed")
    example.change_record("plain", status="failed")


@breaks("moves_are_legal", "a job came back after its end, and nobody had asked for it")
def _came_back(example: HandMadeHistory) -> None:
    example.change_event("plain", 8, status="failed")
    for status in ("queued", "running", "succeeded"):
        example.add_event("plain", "status", status=status)


@breaks("moves_are_legal", "a job that had failed has succeeded, and nobody had resolved it")
def _healed(example: HandMadeHistory) -> None:
    example.change_event("plain", 8, status="failed")
    example.add_event("plain", "status", status="succeeded")


@breaks("persons_are_obeyed_once", "a job was resumed, and nobody had asked for it")
def _resumed_unasked(example: HandMadeHistory) -> None:
    example.change_event("plain", 8, status="failed")
    example.add_event("plain", "status", status="queued", by="resume")


@breaks("persons_are_obeyed_once", "a resolve that was asked for once was done twice")
def _resolved_twice(example: HandMadeHistory) -> None:
    example.ask("resolve", "plain", answer="ok")
    example.change_event("plain", 8, status="failed", resolved=True)
    example.add_event("plain", "status", status="succeeded", resolved=True)


@breaks("history_has_no_gap", "an event is missing")
def _gap(example: HandMadeHistory) -> None:
    del example.history.events["plain"][2]


@breaks("history_has_no_gap", "an event is there twice")
def _twice(example: HandMadeHistory) -> None:
    example.history.events["plain"].insert(2, example.history.events["plain"][2])


@breaks("history_has_no_gap", "the record differs from its last event")
def _differs(example: HandMadeHistory) -> None:
    example.change_record("plain", status="cancelled")


@breaks("times_are_in_order", "finished before it was requested")
def _early(example: HandMadeHistory) -> None:
    example.change_record("plain", finished=1.0)


@breaks("times_are_in_order", "started without a claim")
def _unclaimed(example: HandMadeHistory) -> None:
    example.change_record("plain", started=None)


@breaks("times_are_in_order", "an event is earlier than the one before it")
def _back_in_time(example: HandMadeHistory) -> None:
    event = example.history.events["plain"][5]
    example.history.events["plain"][5] = msgspec.structs.replace(event, at=event.at - 5)


@breaks("tokens_grow", "the next attempt ran with an older token")
def _older_run(example: HandMadeHistory) -> None:
    example.history.lines.append(example.line("plain", "start", 0.5, attempt=2, token=0))


@breaks("tokens_grow", "the token does not grow at a reap")
def _same_token(example: HandMadeHistory) -> None:
    example.change_event("plain", 4, token=1)
    example.change_event("plain", 5, token=2)


@breaks("tokens_grow", "the ledger has an end with an old token")
def _stale(example: HandMadeHistory) -> None:
    example.change_attempt("plain", token=1)


@breaks("writes_hold_their_lease", "a stale worker's end landed, under the token of another")
def _stale_end(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested
    example.history.writes.append(Write("w1", "finish", "plain", 1, at + 8, at + 8.1, True))


@breaks("writes_hold_their_lease", "a stale worker's words landed")
def _stale_words(example: HandMadeHistory) -> None:
    old = next(write for write in example.history.writes if write.job == "plain" and not write.landed)
    example.history.writes.append(msgspec.structs.replace(old, landed=True))


@breaks("writes_hold_their_lease", "words landed after the end")
def _late_words(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested
    example.history.writes.append(Write("w2", "append", "plain", 3, at + 9.5, at + 9.6, True))


@breaks("nobody_waits_in_a_circle", "the database had to end a deadlock")
def _circle(example: HandMadeHistory) -> None:
    example.history.deadlocks.append("ERROR:  deadlock detected")


@breaks("attempts_are_ordinals", "a number was used twice")
def _reused(example: HandMadeHistory) -> None:
    example.history.attempts["plain"].append(example.history.attempts["plain"][0])


@breaks("attempts_are_ordinals", "something ran that the ledger does not know")
def _unknown(example: HandMadeHistory) -> None:
    example.history.lines.append(example.line("plain", "start", 0.5, attempt=2))


@breaks("stops_are_carried", "a cancel was forgotten at a claim")
def _forgotten(example: HandMadeHistory) -> None:
    events = example.history.events["plain"]
    events[0] = msgspec.structs.replace(events[0], type="cancel", data={"cancel": "requested", "kind": "cancel"})


@breaks("stops_are_carried", "a job that is to be stopped goes back into its line")
def _back_in_line(example: HandMadeHistory) -> None:
    example.add_event("plain", "cancel", cancel="requested", kind="cancel")
    example.add_event("plain", "status", status="queued")


def _ask_to_stop(example: HandMadeHistory, *, at: float, until: float) -> None:
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


@breaks("stops_are_carried_out", "an adopter forgot a cancel")
def _not_stopped(example: HandMadeHistory) -> None:
    _ask_to_stop(example, at=3.0, until=14.0)


@breaks("stops_are_carried_out", "an owner did not hear a cancel")
def _not_heard(example: HandMadeHistory) -> None:
    _ask_to_stop(example, at=6.0, until=14.0)


@breaks("stops_are_written", "a cancel was answered, and is in no record")
def _unwritten(example: HandMadeHistory) -> None:
    example.ask("cancel", "plain", answer="ok")
    begin = example.history.records["plain"].requested
    example.history.calls[-1] = msgspec.structs.replace(example.history.calls[-1], sent=begin + 3, answered=begin + 3.1)


@breaks("limits_are_kept", "an adopter restarted a timeout")
def _counted_anew(example: HandMadeHistory) -> None:
    example.change_record("plain", policy={"stop_grace": 0.5, "timeout": 2.0})


@breaks("limits_are_kept", "a child that says nothing lives on")
def _silent(example: HandMadeHistory) -> None:
    begin = example.history.records["plain"].requested
    example.change_record("plain", policy={"stop_grace": 0.5, "idle_timeout": 1.0})
    example.history.lines.append(example.line("plain", "tick", begin - example.at + 13, said=3))


@breaks("returns_have_a_reason", "a neighbour took the lease of a worker that was there")
def _taken(example: HandMadeHistory) -> None:
    example.change_event("plain", 4, lease="handed_over")
    example.history.faults.clear()
    example.history.exits.clear()


@breaks("results_are_of_the_end", "the result is that of an earlier attempt")
def _old_result(example: HandMadeHistory) -> None:
    example.change_record("plain", result=0)


@breaks("results_are_of_the_end", "the artifact of a success is not there")
def _no_artifact(example: HandMadeHistory) -> None:
    del example.history.made["plain/1.3"]


@breaks("usage_adds_up", "what an attempt used was counted twice")
def _counted_twice(example: HandMadeHistory) -> None:
    example.change_record("plain", usage={"runs": 2})


@breaks("usage_adds_up", "what an attempt used was not counted")
def _not_counted(example: HandMadeHistory) -> None:
    example.change_record("plain", usage={})


@breaks("attempts_never_overlap", "two attempts at once")
def _overlap(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested - example.at
    example.history.lines.append(example.line("plain", "start", at + 7.5, attempt=2, token=5))


@breaks("attempts_start_once", "adopted by starting it again")
def _restarted(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested - example.at
    example.history.lines.append(example.line("plain", "start", at + 6, pid=11, token=3))


@breaks("attempts_start_once", "started twice under one token, by processes of the same number")
def _restarted_alike(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested - example.at
    example.history.lines.append(example.line("plain", "start", at + 2.5))


@breaks("attempts_start_once", "a failure of something that never ran")
def _never_failed(example: HandMadeHistory) -> None:
    _never_ran(example)
    example.change_attempt("plain", cause="exit", status="failed", exit_code=3)


@breaks("attempts_start_once", "a success of something that never ran")
def _never_ran(example: HandMadeHistory) -> None:
    example.history.lines = [line for line in example.history.lines if line.job != "plain"]


@breaks("attempts_start_once", "what was said not to have started has run")
def _drained(example: HandMadeHistory) -> None:
    example.change_attempt("plain", cause="drained")


@breaks("success_has_its_witness", "a success without an end")
def _no_end(example: HandMadeHistory) -> None:
    example.history.lines = [line for line in example.history.lines if (line.job, line.what) != ("plain", "end")]


@breaks("success_has_its_witness", "a success before the end")
def _too_soon(example: HandMadeHistory) -> None:
    example.change_attempt("plain", ended=example.history.records["plain"].requested + 6)


@breaks("nothing_runs_after_the_end", "a grandchild lives on after a timeout")
def _kin(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested - example.at
    example.history.lines.append(example.line("plain", "kin", at + 9.5, said=3))


@breaks("nothing_runs_after_the_end", "a process is left when all is over")
def _left(example: HandMadeHistory) -> None:
    example.history.alive.append(SurvivingProcess("plain", 1, 10))


@breaks("nothing_runs_after_the_end", "a process of a job that nobody knows is left")
def _left_unknown(example: HandMadeHistory) -> None:
    example.history.alive.append(SurvivingProcess("nobody's", 1, 10))


@breaks("losses_have_a_reason", "a child that stops by itself is called lost while somebody beats for it")
def _lost_too_soon(example: HandMadeHistory) -> None:
    _lost(example)
    example.change_record("plain", policy={"stop_grace": 1.0, "stop_after": 4.0})


@breaks("losses_have_a_reason", "a child that nobody touched is called lost")
def _lost(example: HandMadeHistory) -> None:
    example.change_attempt("plain", cause="lost", status="failed", exit_code=None)


@breaks("reaps_have_a_reason", "a lease is taken from a worker that was well")
def _reaped(example: HandMadeHistory) -> None:
    example.history.faults.clear()


@breaks("no_gate_was_stuck", "a lane stood still until a duty noticed")
def _stuck(example: HandMadeHistory) -> None:
    example.history.mended.append("repaired a stuck gate: needs of job plain, lane None")


@breaks("no_gate_was_stuck", "a lane without a holder stood still until a duty noticed")
def _stuck_lane(example: HandMadeHistory) -> None:
    example.history.mended.append("repaired a stuck gate: lane of job None, lane ('default', 'lane')")


@breaks("lanes_do_not_stand_still", "a lane is free, and those who come later pass the first in it")
def _stands_still(example: HandMadeHistory) -> None:
    example.job("late", lane="still")
    shift = 100.0
    for n in range(5):
        example.job(f"other {n}")
    events = example.history.events["late"]
    example.history.events["late"] = [
        *events[:1], *(msgspec.structs.replace(event, at=event.at + shift) for event in events[1:]),
    ]  # fmt: skip


@breaks("lanes_hold_one_job", "two jobs of a lane are claimed at once")
def _both(example: HandMadeHistory) -> None:
    late = example.history.events["lane 2"][1]
    first = example.history.records["lane 1"].requested
    example.history.events["lane 2"][1] = msgspec.structs.replace(late, at=first + 5)


@breaks("lanes_hold_one_job", "two children of a lane run at once")
def _both_run(example: HandMadeHistory) -> None:
    at = example.history.records["lane 1"].requested - example.at
    example.history.lines.append(example.line("lane 2", "tick", at + 7))


@breaks("lanes_hold_one_job", "a failed job does not block its lane")
def _unblocked(example: HandMadeHistory) -> None:
    example.change_event("lane 1", 8, status="failed")


@breaks("lanes_keep_order", "the later one of a lane starts first")
def _disorder(example: HandMadeHistory) -> None:
    events = example.history.events
    events["lane 1"], events["lane 2"] = events["lane 2"], events["lane 1"]


@breaks("needs_come_first", "a dependant is claimed too soon")
def _too_early(example: HandMadeHistory) -> None:
    late = example.history.events["dependant"][1]
    first = example.history.records["plain"].requested
    example.history.events["dependant"][1] = msgspec.structs.replace(late, at=first + 5)


@breaks("one_builder_per_key", "two builders at once")
def _two_builders(example: HandMadeHistory) -> None:
    example.job("builder 2", reuse_key="key", rebuild=True)
    first = example.history.records["builder"].requested
    old = example.history.events["builder 2"][0]
    example.history.events["builder 2"][0] = msgspec.structs.replace(old, at=first + 5)


@breaks("logs_are_whole", "a line is there twice")
def _repeated_line(example: HandMadeHistory) -> None:
    example.change_event("plain", 6, lines=["1 out 2", "1 out 3"])


@breaks("logs_are_whole", "the last line is lost")
def _lost_line(example: HandMadeHistory) -> None:
    example.change_event("plain", 6, lines=[])


@breaks("followers_miss_nothing", "an event was skipped at a cut")
def _skipped(example: HandMadeHistory) -> None:
    example.history.follows[1].events = example.history.follows[1].events[1:]


@breaks("followers_miss_nothing", "an event came twice")
def _came_twice(example: HandMadeHistory) -> None:
    example.history.follows[0].events = [*example.history.follows[0].events, example.history.follows[0].events[-1]]


@breaks("followers_miss_nothing", "a stream ended in the middle")
def _ended_early(example: HandMadeHistory) -> None:
    example.history.follows[0].ended = True


def test_good_history_passes() -> None:
    """Proves L1, R3, N1, E3 as far as the checker raises no false alarm."""
    assert [str(violation) for violation in check(good().history)] == []


def test_missing_job_with_a_delete_request_passes() -> None:
    """Also one whose delete was not answered, and what others are told of it afterwards."""
    for answer in ("ok", "unknown"):
        example = good()
        example.history.follows.clear()
        _missing(example)
        example.ask("delete", "plain", answer=answer)
        example.ask("cancel", "plain", answer="refused", error="404 no job plain")
        assert [str(violation) for violation in check(example.history)] == []


@pytest.mark.parametrize(
    ("rule", "make"), [pytest.param(rule, make, id=what) for rule, found in BROKEN.items() for what, make in found]
)
def test_broken_history_is_caught(rule: str, make: Breakage) -> None:
    """Proves J1, J2, J4, J12, L4, L13, L15, L18, R2, R3, R8, R10, R22, C1, N1, N2, N6, N7, E1, E3: a breach is seen."""
    example = good()
    make(example)
    found = check(example.history)
    assert rule in {violation.rule for violation in found}
    assert all(violation.timeline for violation in found if violation.rule == rule)


@pytest.mark.parametrize(
    ("kind", "target"), [("full disk", "data"), ("stopped writer", "w9"), ("crash of Postgres", "")]
)
def test_worker_that_cannot_start_without_a_writable_database_passes(kind: str, target: str) -> None:
    example = good()
    example.at += 100
    example.history.faults.append(Fault(kind=kind, at=example.at - 12, until=example.at - 8, target=target))
    example.process_exit("w8", NO_DATABASE)
    assert [str(violation) for violation in check(example.history)] == []


def test_stop_request_without_a_working_owner_passes() -> None:
    """Proves C1 as far as the checker must not raise a false alarm.

    Nobody held the job, its holder was stopped, or it ended in time.
    """
    for at, until, stopped in ((3.0, 10.0, 0.0), (6.0, 10.0, 0.0), (6.0, 16.0, 8.0)):
        example = good()
        _ask_to_stop(example, at=at, until=until)
        begin = example.history.records["plain"].requested
        example.history.faults.append(Fault(kind="stop worker", at=begin + 7, until=begin + 7 + stopped, target="w2"))
        assert "stops_are_carried_out" not in {violation.rule for violation in check(example.history)}


def test_lost_job_that_a_person_resolved_has_left_nothing() -> None:
    """Proves R14 as far as the checker must not raise a false alarm: nobody was there to take what its attempt left."""
    example = good()
    example.change_event("plain", 8, status="paused", code="lost")
    example.change_attempt("plain", cause="lost", end_seq=None)
    example.ask("resolve", "plain", answer="ok")
    example.add_event("plain", "status", status="succeeded", resolved=True)
    example.change_record("plain", result=None)
    del example.history.made["plain/1.3"]
    assert "results_are_of_the_end" not in {violation.rule for violation in check(example.history)}


def test_child_that_stopped_by_itself_may_be_lost() -> None:
    """Proves R21 as far as the checker must not raise a false alarm: nobody had renewed its lease for that time."""
    example = good()
    _lost(example)
    example.change_record("plain", policy={"stop_grace": 1.0, "stop_after": 3.0})
    assert "losses_have_a_reason" not in {violation.rule for violation in check(example.history)}


def test_lease_that_its_holder_gave_back_passes() -> None:
    """Proves L19 as far as the checker must not raise a false alarm."""
    example = good()
    _taken(example)
    begin = example.history.records["plain"].requested
    example.history.writes.append(Write("w1", "hand_over", "plain", 1, begin + 4.9, begin + 4.9, True))
    assert "returns_have_a_reason" not in {
        violation.rule for violation in check(example.history) if violation.job == "plain"
    }


def test_key_whose_rebuild_failed_is_built_again() -> None:
    """Proves N7: what stands for a key is the latest job."""
    example = good()
    example.job("builder 2", reuse_key="key", rebuild=True)
    example.change_record("builder 2", status="failed")
    example.change_event("builder 2", 8, status="failed")
    example.change_attempt("builder 2", status="failed", exit_code=3)
    example.job("builder 3", reuse_key="key")
    assert [str(violation) for violation in check(example.history)] == []


def test_every_rule_is_broken_once() -> None:
    elsewhere = {*pipelines.RULES, *budgets.RULES, *builds.RULES, *deletes.RULES}
    assert {rule.__name__ for rule in RULES if rule not in elsewhere} == set(BROKEN)


def test_history_survives_a_file(tmp_path: Any) -> None:
    history = good().history
    history.save(tmp_path / "history")
    again = History.load(tmp_path / "history")
    assert (again.lines, again.events, again.attempts) == (history.lines, history.events, history.attempts)
