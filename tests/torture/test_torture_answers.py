"""The checker's rules about answers that must be true: budgets, reuse keys, deletes. Each is broken by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from torture.checker import check
from torture.checks import budgets, builds, deletes
from torture.history import Call, Event

from tests.support.breakages import Breakages
from tests.support.hand_made_histories import HandMadeHistory, good

BROKEN = Breakages[HandMadeHistory]()
PRICE = {"FIRST": "2", "EACH": "1", "LAST": "3", "LINES": "3"}
SPENT = 8.0
"""Tokens that a run uses at this price."""


def whole() -> HandMadeHistory:
    """A job that used up its budget to the last token, an old build that failed, a new one, and a deleted job."""
    example = good()
    example.job("spender", spec={"env": PRICE}, budget={"tokens": SPENT})
    _budget(example, SPENT)
    example.job("old", reuse_key="build")
    _fail(example, "old")
    example.job("new", reuse_key="build")
    example.job("deleted")
    _delete(example, "deleted")
    return example


def found(example: HandMadeHistory) -> set[str]:
    return {violation.rule for violation in check(example.history)}


def _budget(example: HandMadeHistory, most: float, used: float = SPENT) -> None:
    policy = {"stop_grace": 1.0, "timeout": 20.0, "budget": {"tokens": most}}
    example.change_record("spender", policy=policy, usage={"runs": 1, "tokens": used})


def _fail(example: HandMadeHistory, name: str) -> None:
    example.change_event(name, 8, status="failed")
    example.change_attempt(name, status="failed", exit_code=3)
    example.change_record(name, status="failed", result=None)


def _delete(example: HandMadeHistory, name: str, **answer: Any) -> None:
    """Somebody deleted it: nothing is left of its record."""
    for part in (example.history.records, example.history.events, example.history.attempts):
        del part[name]
    example.ask("delete", name, **{"answer": "ok", "outcome": "deleted", **answer})


def _resume(example: HandMadeHistory, name: str, **call: Any) -> None:
    example.at -= 1
    example.ask("resume", name, answer="ok", **call)
    example.at += 1
    example.add_event(name, "status", status="queued", by="resume")


def _ask_for(example: HandMadeHistory, answer: str, *, key: str = "build", reused: bool = True, **asked: Any) -> None:
    """Somebody asks for a key, and is answered with this job."""
    n, body = len(example.history.calls), {"runner": "process", "reuse_key": key, **asked}
    example.history.calls.append(
        Call(
            n=n, verb="submit", sent=example.at, answered=example.at + 0.1, answer="ok",
            ids=(answer,), jobs=(body,), reused=reused,
        )
    )  # fmt: skip


@BROKEN.breaks("budgets_are_kept", "a success used more than its budget, by its record")
def _over(example: HandMadeHistory) -> None:
    _budget(example, SPENT, used=SPENT + 1)


@BROKEN.breaks("budgets_are_kept", "a success used more than its budget, and its record does not know")
def _unheard(example: HandMadeHistory) -> None:
    _budget(example, SPENT - 1, used=SPENT - 1)


@BROKEN.breaks("spent_budgets_are_not_resumed", "a job with nothing left of its budget was resumed")
def _spent(example: HandMadeHistory) -> None:
    _use_up(example)
    _resume(example, "spender")


@BROKEN.breaks("spent_budgets_are_not_resumed", "it was resumed with a budget that is used up as well")
def _spent_again(example: HandMadeHistory) -> None:
    _use_up(example)
    _resume(example, "spender", given={"budget": {"tokens": SPENT}})


def _use_up(example: HandMadeHistory) -> None:
    events = example.history.events["spender"]
    events[2] = Event(seq=3, at=events[2].at, type="usage", data={"tokens": SPENT})
    _fail(example, "spender")


@BROKEN.breaks("good_builds_keep_their_key", "an old build that was resumed is given to who asks for the key")
def _old_one(example: HandMadeHistory) -> None:
    _resume(example, "old")
    _ask_for(example, "old")


@BROKEN.breaks("good_builds_keep_their_key", "the key is built again, because an old build failed again")
def _built_again(example: HandMadeHistory) -> None:
    example.job("third", reuse_key="build")


@BROKEN.breaks("good_builds_keep_their_key", "an older success is given to who asks for the key")
def _older(example: HandMadeHistory) -> None:
    example.job("newest", reuse_key="build", rebuild=True)
    _ask_for(example, "new")


@BROKEN.breaks("deleted_jobs_leave_no_files", "a job was called deleted while a file of it was there")
def _left(example: HandMadeHistory) -> None:
    example.history.calls[-1].left = ("artifacts/deleted/1.3/made",)


@BROKEN.breaks("deleted_jobs_leave_no_files", "a file of a deleted job is there at the end")
def _left_for_good(example: HandMadeHistory) -> None:
    example.history.calls[-1].outcome = "deleting"
    example.history.files["deleted"] = ["inputs/deleted/upload/given"]


@BROKEN.breaks("deletes_are_finished", "a job is there though its delete was answered")
def _unfinished(example: HandMadeHistory) -> None:
    example.ask("delete", "plain", answer="ok", outcome="deleting")


def test_correct_answers_pass() -> None:
    assert [str(violation) for violation in check(whole().history)] == []


@pytest.mark.parametrize(("rule", "make"), BROKEN.cases())
def test_wrong_answer_is_found(rule: str, make: Callable[[HandMadeHistory], None]) -> None:
    """Proves H5, D6, D7 as far as a checker can."""
    example = whole()
    make(example)
    assert rule in found(example)


def test_every_rule_about_answers_is_broken_once() -> None:
    rules = (*budgets.RULES, *builds.RULES, *deletes.RULES)
    assert {rule.__name__ for rule in rules} == set(BROKEN.by_rule)


def test_job_over_its_budget_that_a_person_resolved_passes() -> None:
    """Proves H5 as far as the checker must not raise a false alarm."""
    example = whole()
    _use_up(example)
    _budget(example, SPENT - 1)
    example.ask("resolve", "spender", answer="ok")
    example.add_event("spender", "status", status="succeeded", resolved=True)
    assert not found(example) & {rule.__name__ for rule in budgets.RULES}


def test_job_that_was_resumed_with_a_higher_budget_passes() -> None:
    """Proves H5 as far as the checker must not raise a false alarm."""
    example = whole()
    _use_up(example)
    _resume(example, "spender", given={"budget": {"tokens": 2 * SPENT}})
    assert "spent_budgets_are_not_resumed" not in found(example)


@pytest.mark.parametrize("way", ["good", "rebuilt", "old succeeded", "rebuild failed", "deleted", "unknown rebuild"])
def test_key_may_be_answered_otherwise_for_a_reason(way: str) -> None:
    """Proves D6, N7 as far as the checker must not raise a false alarm."""
    example = whole()
    match way:
        case "good":
            _ask_for(example, "new")
        case "rebuilt":
            _ask_for(example, "old", rebuild=True)
        case "old succeeded":
            _resume(example, "old")
            example.add_event("old", "status", status="succeeded")
            _ask_for(example, "old")
        case "rebuild failed":
            example.job("rebuild", reuse_key="build", rebuild=True)
            _fail(example, "rebuild")
            example.job("third", reuse_key="build")
        case "deleted":
            _delete(example, "new")
            example.job("third", reuse_key="build")
        case "unknown rebuild":
            example.job("rebuild", reuse_key="build", rebuild=True)
            _delete(example, "rebuild")
            example.job("third", reuse_key="build")
    assert "good_builds_keep_their_key" not in found(example)
