"""The checker's rules about answers that must be true: budgets, reuse keys, deletes. Each is broken by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from torture.checker import check
from torture.checks import budgets, builds, deletes
from torture.history import Call, Event

from tests.support.hand_made_histories import Tale, good

Break = Callable[[Tale], None]
BROKEN: dict[str, list[tuple[str, Break]]] = {}
PRICE = {"FIRST": "2", "EACH": "1", "LAST": "3", "LINES": "3"}
SPENT = 8.0
"""Tokens that a run uses at this price."""


def breaks(rule: str, what: str) -> Callable[[Break], Break]:
    """Register a way to break a good tale, and the rule that must see it."""

    def register(make: Break) -> Break:
        BROKEN.setdefault(rule, []).append((what, make))
        return make

    return register


def whole() -> Tale:
    """A job that used up its budget to the last token, an old build that failed, a new one, and a deleted job."""
    tale = good()
    tale.job("spender", spec={"env": PRICE}, budget={"tokens": SPENT})
    _budget(tale, SPENT)
    tale.job("old", reuse_key="build")
    _fail(tale, "old")
    tale.job("new", reuse_key="build")
    tale.job("deleted")
    _delete(tale, "deleted")
    return tale


def found(tale: Tale) -> set[str]:
    return {violation.rule for violation in check(tale.history)}


def _budget(tale: Tale, most: float, used: float = SPENT) -> None:
    policy = {"stop_grace": 1.0, "timeout": 20.0, "budget": {"tokens": most}}
    tale.change_record("spender", policy=policy, usage={"runs": 1, "tokens": used})


def _fail(tale: Tale, name: str) -> None:
    tale.change_event(name, 8, status="failed")
    tale.change_attempt(name, status="failed", exit_code=3)
    tale.change_record(name, status="failed", result=None)


def _delete(tale: Tale, name: str, **answer: Any) -> None:
    """Somebody deleted it: nothing is left of its record."""
    for part in (tale.history.records, tale.history.events, tale.history.attempts):
        del part[name]
    tale.ask("delete", name, **{"answer": "ok", "outcome": "deleted", **answer})


def _resume(tale: Tale, name: str, **call: Any) -> None:
    tale.at -= 1
    tale.ask("resume", name, answer="ok", **call)
    tale.at += 1
    tale.add_event(name, "status", status="queued", by="resume")


def _ask_for(tale: Tale, answer: str, *, key: str = "build", reused: bool = True, **asked: Any) -> None:
    """Somebody asks for a key, and is answered with this job."""
    n, body = len(tale.history.calls), {"runner": "process", "reuse_key": key, **asked}
    tale.history.calls.append(
        Call(
            n=n, verb="submit", sent=tale.at, answered=tale.at + 0.1, answer="ok",
            ids=(answer,), jobs=(body,), reused=reused,
        )
    )  # fmt: skip


@breaks("budgets_are_kept", "a success used more than its budget, by its record")
def _over(tale: Tale) -> None:
    _budget(tale, SPENT, used=SPENT + 1)


@breaks("budgets_are_kept", "a success used more than its budget, and its record does not know")
def _unheard(tale: Tale) -> None:
    _budget(tale, SPENT - 1, used=SPENT - 1)


@breaks("spent_budgets_are_not_resumed", "a job with nothing left of its budget was resumed")
def _spent(tale: Tale) -> None:
    _use_up(tale)
    _resume(tale, "spender")


@breaks("spent_budgets_are_not_resumed", "it was resumed with a budget that is used up as well")
def _spent_again(tale: Tale) -> None:
    _use_up(tale)
    _resume(tale, "spender", given={"budget": {"tokens": SPENT}})


def _use_up(tale: Tale) -> None:
    events = tale.history.events["spender"]
    events[2] = Event(seq=3, at=events[2].at, type="usage", data={"tokens": SPENT})
    _fail(tale, "spender")


@breaks("good_builds_keep_their_key", "an old build that was resumed is given to who asks for the key")
def _old_one(tale: Tale) -> None:
    _resume(tale, "old")
    _ask_for(tale, "old")


@breaks("good_builds_keep_their_key", "the key is built again, because an old build failed again")
def _built_again(tale: Tale) -> None:
    tale.job("third", reuse_key="build")


@breaks("good_builds_keep_their_key", "an older success is given to who asks for the key")
def _older(tale: Tale) -> None:
    tale.job("newest", reuse_key="build", rebuild=True)
    _ask_for(tale, "new")


@breaks("deleted_jobs_leave_no_files", "a job was called deleted while a file of it was there")
def _left(tale: Tale) -> None:
    tale.history.calls[-1].left = ("artifacts/deleted/1.3/made",)


@breaks("deleted_jobs_leave_no_files", "a file of a deleted job is there at the end")
def _left_for_good(tale: Tale) -> None:
    tale.history.calls[-1].outcome = "deleting"
    tale.history.files["deleted"] = ["inputs/deleted/upload/given"]


@breaks("deletes_are_finished", "a job is there though its delete was answered")
def _unfinished(tale: Tale) -> None:
    tale.ask("delete", "plain", answer="ok", outcome="deleting")


def test_true_answers_pass() -> None:
    assert [str(violation) for violation in check(whole().history)] == []


@pytest.mark.parametrize(
    ("rule", "what", "make"),
    [(rule, what, make) for rule, ways in BROKEN.items() for what, make in ways],
    ids=[what for ways in BROKEN.values() for what, _ in ways],
)
def test_wrong_answer_is_seen(rule: str, what: str, make: Break) -> None:
    """Proves H5, D6, D7 as far as a checker can."""
    tale = whole()
    make(tale)
    assert rule in found(tale), what


def test_every_rule_about_answers_is_broken_once() -> None:
    rules = (*budgets.RULES, *builds.RULES, *deletes.RULES)
    assert {rule.__name__ for rule in rules} == set(BROKEN)


def test_job_over_its_budget_that_a_person_resolved_passes() -> None:
    """Proves H5 as far as a checker may not cry."""
    tale = whole()
    _use_up(tale)
    _budget(tale, SPENT - 1)
    tale.ask("resolve", "spender", answer="ok")
    tale.add_event("spender", "status", status="succeeded", resolved=True)
    assert not found(tale) & {rule.__name__ for rule in budgets.RULES}


def test_job_that_was_resumed_with_a_higher_budget_passes() -> None:
    """Proves H5 as far as a checker may not cry."""
    tale = whole()
    _use_up(tale)
    _resume(tale, "spender", given={"budget": {"tokens": 2 * SPENT}})
    assert "spent_budgets_are_not_resumed" not in found(tale)


@pytest.mark.parametrize("way", ["good", "rebuilt", "old succeeded", "rebuild failed", "deleted", "unknown rebuild"])
def test_key_may_be_answered_otherwise_for_a_reason(way: str) -> None:
    """Proves D6, N7 as far as a checker may not cry."""
    tale = whole()
    match way:
        case "good":
            _ask_for(tale, "new")
        case "rebuilt":
            _ask_for(tale, "old", rebuild=True)
        case "old succeeded":
            _resume(tale, "old")
            tale.add_event("old", "status", status="succeeded")
            _ask_for(tale, "old")
        case "rebuild failed":
            tale.job("rebuild", reuse_key="build", rebuild=True)
            _fail(tale, "rebuild")
            tale.job("third", reuse_key="build")
        case "deleted":
            _delete(tale, "new")
            tale.job("third", reuse_key="build")
        case "unknown rebuild":
            tale.job("rebuild", reuse_key="build", rebuild=True)
            _delete(tale, "rebuild")
            tale.job("third", reuse_key="build")
    assert "good_builds_keep_their_key" not in found(tale)
