"""The checker's rules about pipelines are checked: a good history passes, and each rule is broken by hand."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from torture.cases import cases
from torture.checker import check
from torture.checks.pipelines import RULES
from torture.history import Event, Removal
from torture.pipelines import content

from tests.support.breakages import Breakages
from tests.support.hand_made_pipelines import LONG, PipelineHistory, good, snapshot_id

BROKEN = Breakages[PipelineHistory]()


@BROKEN.breaks("tasks_run_in_order", "the second task begins before the first has ended")
def _too_soon(example: PipelineHistory) -> None:
    example.move_lines("first", LONG[1], -1.0)


@BROKEN.breaks("tasks_run_in_order", "a task begins after one that failed")
def _after_a_failure(example: PipelineHistory) -> None:
    example.forget("first", "end", LONG[0])


@BROKEN.breaks("tasks_run_in_order", "a task is left out")
def _left_out(example: PipelineHistory) -> None:
    example.job("long", [f"c9.a{'.a' * n}" for n in range(3)])
    example.history.lines = [line for line in example.history.lines if (line.job, line.task) != ("long", "c9.a.a")]


@BROKEN.breaks("tasks_run_in_order", "the workspace is another one")
def _spoilt(example: PipelineHistory) -> None:
    example.line("first", "spoilt", LONG[0])


@BROKEN.breaks("finished_tasks_are_not_repeated", "an adopter runs the task again")
def _again(example: PipelineHistory) -> None:
    example.run("first", LONG[0])


@BROKEN.breaks("known_results_are_not_built_again", "a later job builds what is there")
def _rebuilt(example: PipelineHistory) -> None:
    example.job("again", LONG[:1])


@BROKEN.breaks("known_results_are_not_built_again", "a waiter does not look again when it has the lock")
def _not_looked_again(example: PipelineHistory) -> None:
    example.job("waiter", ["c5.a"])
    made = example.history.kept[-1].made
    claim = example.history.events["waiter"][1]
    example.history.events["waiter"][1] = msgspec.structs.replace(claim, at=made - 10)
    example.change_kept("c5.a", made=made - 5, job="first")


@BROKEN.breaks(
    "known_results_are_not_built_again", "a second attempt runs what the first one stored, and it stands no more"
)
def _next_attempt(example: PipelineHistory) -> None:
    example.history.kept.clear()
    example.run("first", LONG[0], attempt=2, token=5)
    example.history.events["first"].append(
        Event(seq=99, at=example.at - 3, type="status", data={"status": "running", "attempt": 2, "worker": "w3"})
    )


@BROKEN.breaks("one_builder_per_snapshot", "two jobs build the same at once")
def _two_builders(example: PipelineHistory) -> None:
    example.job("builder 1", ["c6.a"])
    example.job("builder 2", ["c6.a"])
    example.move_lines("builder 2", "c6.a", -5.0)


@BROKEN.breaks("cached_tasks_do_not_run", "what is called cached has run")
def _cached_ran(example: PipelineHistory) -> None:
    example.at = example.history.events["second"][1].at
    example.run("second", LONG[0])


@BROKEN.breaks("pipelines_succeed_whole", "a task is still to run")
def _pending(example: PipelineHistory) -> None:
    example.change_task("first", 1, status="pending")


@BROKEN.breaks("pipelines_succeed_whole", "a task never came to its end")
def _no_end(example: PipelineHistory) -> None:
    example.forget("first", "end", LONG[1])


@BROKEN.breaks("pipelines_succeed_whole", "there never was a plan")
def _no_plan(example: PipelineHistory) -> None:
    del example.history.tasks["first"]


@BROKEN.breaks("pipelines_have_the_outputs_of_their_tasks", "a job that found all of it known has no files")
def _no_files(example: PipelineHistory) -> None:
    example.history.outputs["second"] = {}


@BROKEN.breaks("pipelines_have_the_outputs_of_their_tasks", "the file of a task that was known is missing")
def _file_missing(example: PipelineHistory) -> None:
    example.history.outputs["third"] = {
        path: text for path, text in example.history.outputs["third"].items() if path != LONG[0]
    }


@BROKEN.breaks(
    "pipelines_have_the_outputs_of_their_tasks", "an earlier task's file stands in the place of a later one's"
)
def _earlier_file(example: PipelineHistory) -> None:
    example.history.outputs["third"] = {**example.history.outputs["third"], "last": f"{LONG[1]}\n"}


@BROKEN.breaks("pipelines_have_the_outputs_of_their_tasks", "a job that found all of it known has no result")
def _no_result(example: PipelineHistory) -> None:
    assert example.history.records["second"].result is not None
    example.history.records["second"] = msgspec.structs.replace(example.history.records["second"], result=None)


@BROKEN.breaks("snapshots_are_what_their_trail_says", "a file is not whole")
def _not_whole(example: PipelineHistory) -> None:
    example.change_kept(LONG[1], files={**content(LONG[1]), "whole": ""})


@BROKEN.breaks("snapshots_are_what_their_trail_says", "a file of a later task is in it")
def _too_much(example: PipelineHistory) -> None:
    example.change_kept(LONG[0], files=content(LONG[1]))


@BROKEN.breaks("snapshots_are_what_their_trail_says", "a folder is not what was published")
def _not_published(example: PipelineHistory) -> None:
    example.change_kept(LONG[0], verified=False)


@BROKEN.breaks("snapshots_are_what_their_trail_says", "it was made from another one")
def _another_parent(example: PipelineHistory) -> None:
    example.change_kept(LONG[1], parent="f" * 64)


@BROKEN.breaks("snapshots_are_what_their_trail_says", "one result has two ids")
def _two_ids(example: PipelineHistory) -> None:
    example.history.kept.append(msgspec.structs.replace(example.history.kept[0], id="f" * 64))


@BROKEN.breaks("no_half_snapshot_is_left", "a folder without a row outlives the sweep")
def _unnamed(example: PipelineHistory) -> None:
    example.history.unnamed.append("f" * 64)


@BROKEN.breaks("no_half_snapshot_is_left", "a worker found a damaged one")
def _damaged(example: PipelineHistory) -> None:
    example.history.damaged.append(snapshot_id(LONG[0]))


@BROKEN.breaks("task_logs_are_whole", "the last line of a task is lost")
def _lost_line(example: PipelineHistory) -> None:
    _log(example)["lines"].pop()


@BROKEN.breaks("task_logs_are_whole", "a line is there twice")
def _repeated_line(example: PipelineHistory) -> None:
    _log(example)["lines"].insert(0, _log(example)["lines"][0])


@BROKEN.breaks("task_logs_are_whole", "a line is under another task's name")
def _other_name(example: PipelineHistory) -> None:
    events = example.history.events["first"]
    events[:] = [msgspec.structs.replace(event, task="c1.b") if event.type == "log" else event for event in events]


def _log(example: PipelineHistory) -> Any:
    return next(event.data for event in example.history.events["first"] if event.type == "log" and event.data["lines"])


def test_good_history_passes() -> None:
    assert [str(violation) for violation in check(good().history)] == []


@pytest.mark.parametrize(("rule", "make"), BROKEN.cases())
def test_broken_history_is_caught(rule: str, make: Callable[[PipelineHistory], None]) -> None:
    """Proves P1, P2, P4, P5, P6: a breach is seen."""
    example = good()
    make(example)
    assert rule in {violation.rule for violation in check(example.history)}


def test_every_rule_is_broken_once() -> None:
    assert {rule.__name__ for rule in RULES} == set(BROKEN.by_rule)


def test_removed_snapshot_may_be_built_again() -> None:
    """Removed itself, or with what it was made from; but not before it was made."""
    for removed, caught in ((LONG[1], False), (LONG[0], False), (LONG[2], True)):
        example = good()
        example.history.removals.append(Removal(trail=removed, sent=example.at, answered=example.at + 1))
        example.history.kept = [kept for kept in example.history.kept if kept.trail != LONG[1]]
        example.at += 2
        example.job("again", LONG[:2], known=1)
        found = {violation.rule for violation in check(example.history)}
        assert ("known_results_are_not_built_again" in found) is caught, removed


def test_builder_whose_lease_was_taken_may_be_joined_by_another() -> None:
    """Proves P5: the lock falls with the lease, while what runs is on its way to be adopted."""
    example = good()
    example.job("builder 1", ["c6.a"], leases=True)
    example.job("builder 2", ["c6.a"])
    example.move_lines("builder 2", "c6.a", -4.0)
    example.history.kept.pop()
    lease = next(n for n, event in enumerate(example.history.events["builder 1"]) if event.type == "lease")
    begun = next(line.at for line in example.history.lines if (line.job, line.what) == ("builder 2", "start"))
    example.history.events["builder 1"][lease] = msgspec.structs.replace(
        example.history.events["builder 1"][lease], at=begun - 0.2
    )
    assert "one_builder_per_snapshot" not in {violation.rule for violation in check(example.history)}


def test_abandoned_attempt_does_not_affect_the_next() -> None:
    """It has no end in the history: what the next attempt found in the store is not its own word."""
    example = good()
    attempt, events = example.history.attempts["first"][0], example.history.events["first"]
    given_up = msgspec.structs.replace(attempt, end_seq=None, cause="lost", status="queued")
    last = msgspec.structs.replace(attempt, attempt=2, claim_seq=len(events) + 1, end_seq=len(events) + 2)
    example.history.attempts["first"] = [given_up, last]
    cached = {"status": "succeeded", "cached": True}
    events.append(Event(seq=len(events) + 2, at=example.at, type="task", task=LONG[0], data=cached))
    assert "cached_tasks_do_not_run" not in {violation.rule for violation in check(example.history)}


def test_snapshot_removed_before_the_next_task_may_be_built_again() -> None:
    """The next task's start says that it was made, not that it is still there."""
    example = good()
    ended = next(line.at for line in example.history.lines if (line.what, line.task) == ("end", LONG[0]))
    example.history.removals.append(Removal(trail=LONG[0], sent=ended + 0.1, answered=ended + 0.2))
    example.history.kept.clear()
    example.job("again", LONG[:1])
    assert "known_results_are_not_built_again" not in {violation.rule for violation in check(example.history)}


def test_job_that_was_deleted_does_not_tell_when_it_looked() -> None:
    """Its claim is gone with its history: another job may have stored the result between its look and its start."""
    example = good()
    example.job("again", LONG[:1])
    assert "known_results_are_not_built_again" in {violation.rule for violation in check(example.history)}
    example.history.events.pop("again")
    assert "known_results_are_not_built_again" not in {violation.rule for violation in check(example.history)}


def test_job_that_was_deleted_does_not_say_which_tasks_it_found_cached() -> None:
    """Only its events say so, and they are gone. That a task began before the one it builds on is still seen."""
    example = good()
    _left_out(example)
    example.history.events.pop("long")
    assert "tasks_run_in_order" not in {violation.rule for violation in check(example.history)}
    example.move_lines("long", "c9.a.a.a", -10.0)
    assert "tasks_run_in_order" in {violation.rule for violation in check(example.history)}


def test_pipeline_that_joined_another_job_is_not_its_maker() -> None:
    """The call that made a job says what it is, not one that was answered with it."""
    example = good()
    example.job("made", ["c8.a"])
    call = example.history.calls[-1]
    other = {"runner": "process", "tasks": [{"name": "c9.a"}], "snapshot": "final"}
    joined = {"n": call.n + 1, "sent": call.sent - 1, "jobs": (other,), "reused": True}
    example.history.calls.append(msgspec.structs.replace(call, **joined))
    example.history.calls[-2:] = reversed(example.history.calls[-2:])
    made = cases(example.history)["made"].submitted
    assert made is not None
    assert made["tasks"] == [{"name": "c8.a"}]
    assert [str(violation) for violation in check(example.history)] == []
