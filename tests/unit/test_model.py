"""The plain values: the table of moves, ids, outcomes, the tree of errors, time."""

import random
import uuid

import pytest

from holdfast import errors
from holdfast.model import MOVES, TERMINAL, Outcome, Status, StopKind, Verb, is_legal, new_id
from holdfast.timing import ManualClock, SystemClock, backoff, from_micros, jitter, to_micros

# DESIGN's table of statuses: what each may become.
MAY_BECOME = {
    Status.PENDING: {Status.QUEUED, Status.CANCELLED, Status.FAILED},
    Status.QUEUED: {Status.RUNNING, Status.CANCELLED, Status.FAILED, Status.TIMED_OUT},
    Status.RUNNING: {
        Status.SUCCEEDED,
        Status.FAILED,
        Status.TIMED_OUT,
        Status.CANCELLED,
        Status.PAUSED,
        Status.QUEUED,
    },
    Status.PAUSED: {Status.QUEUED, Status.SUCCEEDED, Status.CANCELLED, Status.RUNNING},
    # Pending again: a held dependant whose need was resumed.
    Status.FAILED: {Status.QUEUED, Status.SUCCEEDED, Status.PENDING},
    Status.TIMED_OUT: {Status.QUEUED, Status.SUCCEEDED},
    Status.SUCCEEDED: set(),
    Status.CANCELLED: {Status.QUEUED},
}


def test_table_of_moves_is_the_one_that_is_documented() -> None:
    """Proves J4."""
    found: dict[Status, set[Status]] = {status: set() for status in Status}
    for moves in MOVES.values():
        for source, targets in moves.items():
            found[source] |= targets - {source}
    assert found == MAY_BECOME


def test_legal_follows_the_table() -> None:
    """Proves J4."""
    assert is_legal(Verb.RESUME, Status.FAILED)
    assert not is_legal(Verb.RESUME, Status.SUCCEEDED)
    assert not any(is_legal(verb, Status.SUCCEEDED) for verb in Verb)
    assert {status for status in Status if status.terminal} == TERMINAL


def test_ids_are_uuid7_and_grow() -> None:
    ids = [new_id() for _ in range(5000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 5000
    assert {(uuid.UUID(text).version, uuid.UUID(text).variant) for text in ids} == {(7, uuid.RFC_4122)}


@pytest.mark.parametrize(
    "fields", [{"status": Status.PENDING}, {"status": Status.RUNNING}, {"status": Status.QUEUED, "delay": -1}]
)
def test_outcome_that_no_attempt_can_have_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"cannot become|delay"):
        Outcome(**fields)  # type: ignore[arg-type]


def test_stop_requests_only_escalate() -> None:
    """Proves C1."""
    interrupt, cancel, delete = StopKind
    assert cancel.escalates(interrupt)
    assert delete.escalates(cancel)
    assert interrupt.escalates(None)
    assert not interrupt.escalates(cancel)
    assert not cancel.escalates(cancel)


def test_every_error_is_in_the_drawn_tree() -> None:
    tree = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.HoldfastError):
            assert name in tree, name


def test_backoff_counts_from_one_and_jitter_stays_near() -> None:
    """Proves L12."""
    with pytest.raises(ValueError, match="counts from 1"):
        backoff(0, base=1, cap=2)
    source = random.Random(7)
    assert all(9 <= jitter(10, 0.1, source) <= 11 for _ in range(100))


def test_times_survive_as_microseconds() -> None:
    now = SystemClock().now()
    assert from_micros(to_micros(now)) == now
    clock = ManualClock(now)
    clock.advance(1.5)
    assert (clock.now() - now).total_seconds() == clock.monotonic() == 1.5
