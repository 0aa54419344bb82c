"""The stop of an attempt as a state machine: reasons, what is sent again, phases, and the end that follows."""

import itertools

import pytest

from holdfast.model import Cause, Error, StopKind, StopPhase, StopRequest
from holdfast.worker.stop_sequence import RESEND_SECONDS, StopReason, StopSequence, budget_error

R, P = StopReason, StopPhase
STRONGER = [[R.DRAIN], [R.LIMIT], [R.LOST, R.TIMEOUT, R.IDLE_TIMEOUT, R.BUDGET], [R.INTERRUPT], [R.CANCEL], [R.DELETE]]
"""The reasons by strength; of two equal ones the first stays."""
REQUESTS = (R.INTERRUPT, R.CANCEL, R.DELETE)


def strength(reason: StopReason) -> int:
    (found,) = [n for n, equal in enumerate(STRONGER) if reason in equal]
    return found


def asked(*reasons: StopReason) -> StopSequence:
    sequence = StopSequence()
    for reason in reasons:
        sequence.ask(reason)
    return sequence


@pytest.mark.parametrize(("first", "second"), list(itertools.product(StopReason, repeat=2)))
def test_only_a_stronger_reason_replaces_another(first: StopReason, second: StopReason) -> None:
    sequence = StopSequence()
    assert sequence.ask(first, Error(code="first", message=""))
    wins = strength(second) > strength(first)
    assert sequence.ask(second, Error(code="second", message="")) is wins
    assert sequence.error is not None
    assert (sequence.reason, sequence.error.code) == ((second, "second") if wins else (first, "first"))


@pytest.mark.parametrize("kind", list(StopKind))
def test_stop_request_is_a_reason_of_its_name(kind: StopKind) -> None:
    sequence = StopSequence()
    assert not sequence.ask_as_requested(None)
    assert sequence.ask_as_requested(StopRequest(kind=kind, phase=P.REQUESTED))
    assert sequence.reason is not None
    assert (sequence.reason.value, sequence.reason.requested) == (kind.value, True)


def test_a_delete_is_shown_as_a_cancel_and_all_others_as_themselves() -> None:
    assert R.DELETE.shown == "cancel"
    assert [reason.shown for reason in R if reason is not R.DELETE] == [r.value for r in R if r is not R.DELETE]


SENT = [
    ("nothing is asked for", [], None, False, 0.0, None),
    ("not sent yet", [R.CANCEL], None, False, 0.0, R.CANCEL),
    ("just sent", [R.CANCEL], R.CANCEL, False, RESEND_SECONDS - 0.1, None),
    ("not acknowledged in time", [R.CANCEL], R.CANCEL, False, RESEND_SECONDS, R.CANCEL),
    ("acknowledged", [R.CANCEL], R.CANCEL, True, 9 * RESEND_SECONDS, None),
    ("escalated", [R.INTERRUPT, R.CANCEL], R.INTERRUPT, True, 0.1, R.CANCEL),
    ("escalated before the acknowledgement", [R.INTERRUPT, R.DELETE], R.INTERRUPT, False, 0.1, R.DELETE),
    ("a weaker one came later", [R.CANCEL, R.BUDGET], R.CANCEL, True, 0.1, None),
    ("a request after the budget", [R.BUDGET, R.INTERRUPT], R.BUDGET, True, 0.1, R.INTERRUPT),
]


@pytest.mark.parametrize(
    ("reasons", "sent", "acknowledged", "after", "due"), [row[1:] for row in SENT], ids=[r[0] for r in SENT]
)
def test_what_is_sent_again(
    reasons: list[StopReason], sent: StopReason | None, acknowledged: bool, after: float, due: StopReason | None
) -> None:
    sequence = asked(*reasons)
    if sent is not None:
        sequence.sent(sent, 100.0)
    if acknowledged:
        sequence.acknowledge()
    assert sequence.due(100.0 + after) is due


def test_a_new_command_needs_a_new_acknowledgement() -> None:
    sequence = asked(R.INTERRUPT)
    sequence.sent(R.INTERRUPT, 0.0)
    sequence.acknowledge()
    sequence.ask(R.CANCEL)
    sequence.sent(R.CANCEL, 1.0)
    assert sequence.due(1.0 + RESEND_SECONDS) is R.CANCEL


ORDER = [P.REQUESTED, P.SIGNALLED, P.KILLED, P.NOT_DEAD, P.DEAD]


@pytest.mark.parametrize(("before", "then"), list(itertools.product(ORDER, repeat=2)))
@pytest.mark.parametrize("reason", list(StopReason))
def test_phases_of_a_request_are_recorded_once_and_in_order(
    reason: StopReason, before: StopPhase, then: StopPhase
) -> None:
    sequence = asked(reason)
    sequence.recorded = before
    forward = reason in REQUESTS and ORDER.index(then) > ORDER.index(before)
    assert sequence.advance(then) is forward
    assert sequence.recorded is (then if forward else before)
    assert not sequence.advance(then)


def test_without_a_stop_there_is_no_phase_and_no_end() -> None:
    sequence = StopSequence()
    assert not sequence.advance(P.SIGNALLED)
    assert (sequence.end(), sequence.due(1e9)) == (None, None)


def test_adopter_continues_from_the_recorded_phase() -> None:
    sequence = StopSequence()
    sequence.continue_from(StopRequest(kind=StopKind.CANCEL, phase=P.KILLED))
    assert sequence.due(0.0) is R.CANCEL
    assert [phase for phase in ORDER if sequence.advance(phase)] == [P.NOT_DEAD, P.DEAD]


ENDS = {
    R.DRAIN: Cause.DRAINED,
    R.LIMIT: Cause.EXIT,
    R.LOST: Cause.DRAINED,
    R.TIMEOUT: Cause.TIMED_OUT,
    R.IDLE_TIMEOUT: Cause.IDLE_TIMEOUT,
    R.BUDGET: Cause.CANCELLED,
    R.INTERRUPT: Cause.INTERRUPTED,
    R.CANCEL: Cause.CANCELLED,
    R.DELETE: Cause.CANCELLED,
}


@pytest.mark.parametrize(("reason", "cause"), list(ENDS.items()))
def test_end_follows_the_reason(reason: StopReason, cause: Cause) -> None:
    end = asked(reason).end()
    assert end is not None
    assert (end.cause, end.error) == (cause, None)


def test_end_names_the_budget_unless_a_request_came_too() -> None:
    sequence = StopSequence()
    sequence.ask(R.BUDGET, budget_error("7 of 5 tokens"))
    end = sequence.end()
    assert end is not None
    assert end.error == Error(code="budget_exceeded", message="7 of 5 tokens")
    sequence.ask(R.CANCEL)
    end = sequence.end()
    assert end is not None
    assert (end.cause, end.error) == (Cause.CANCELLED, None)
