"""The checker of torture runs is checked: a good history passes, and each rule is broken by hand once."""

from collections.abc import Callable
from typing import Any

import pytest
from torture.checker import RULES, check
from torture.checks import budgets, builds, deletes, pipelines
from torture.checks.exits import NO_DATABASE
from torture.history import Fault, History, Write

from tests.support.broken_attempts import BROKEN_ATTEMPTS, lost, taken
from tests.support.broken_jobs import BROKEN_JOBS, ask_to_stop, missing
from tests.support.broken_lanes import BROKEN_LANES
from tests.support.hand_made_histories import HandMadeHistory, good

BROKEN = (BROKEN_JOBS, BROKEN_ATTEMPTS, BROKEN_LANES)


def test_good_history_passes() -> None:
    """Proves L1, R3, N1, E3 as far as the checker raises no false alarm."""
    assert [str(violation) for violation in check(good().history)] == []


def test_missing_job_with_a_delete_request_passes() -> None:
    """Also one whose delete was not answered, and what others are told of it afterwards."""
    for answer in ("ok", "unknown"):
        example = good()
        example.history.follows.clear()
        missing(example)
        example.ask("delete", "plain", answer=answer)
        example.ask("cancel", "plain", answer="refused", error="404 no job plain")
        assert [str(violation) for violation in check(example.history)] == []


@pytest.mark.parametrize(("rule", "make"), [case for part in BROKEN for case in part.cases()])
def test_broken_history_is_caught(rule: str, make: Callable[[HandMadeHistory], None]) -> None:
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
        ask_to_stop(example, at=at, until=until)
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
    lost(example)
    example.change_record("plain", policy={"stop_grace": 1.0, "stop_after": 3.0})
    assert "losses_have_a_reason" not in {violation.rule for violation in check(example.history)}


def test_lease_that_its_holder_gave_back_passes() -> None:
    """Proves L19 as far as the checker must not raise a false alarm."""
    example = good()
    taken(example)
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
    assert {rule.__name__ for rule in RULES if rule not in elsewhere} == {
        rule for part in BROKEN for rule in part.by_rule
    }


def test_history_survives_a_file(tmp_path: Any) -> None:
    history = good().history
    history.save(tmp_path / "history")
    again = History.load(tmp_path / "history")
    assert (again.lines, again.events, again.attempts) == (history.lines, history.events, history.attempts)
