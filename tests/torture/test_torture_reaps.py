"""When a lease may be taken from a worker, as the checker of torture runs sees it, by histories made by hand."""

from collections.abc import Callable

import pytest
from torture.checker import check
from torture.history import Beat, Fault, Lag

from tests.support.hand_made_histories import HandMadeHistory, good


def _instead_of_the_kill(example: HandMadeHistory, *, lag: float = 0.0) -> float:
    """Nobody killed the worker of `plain`, claimed after a second and reaped after five; return its time zero."""
    at = example.history.records["plain"].requested
    example.history.faults = [fault for fault in example.history.faults if fault.at > at + 10]
    example.history.lags = [Lag("w1", at + 2, at + 2 + lag)]
    return at


def _reaped_after_an_outage(example: HandMadeHistory) -> None:
    """A lease is taken because the database was away."""
    at = _instead_of_the_kill(example)
    example.history.faults.append(Fault(kind="restart of Postgres", at=at + 1.5, until=at + 4.9))
    example.history.beats.append(Beat("w1", at + 1.6, at + 4.8, None))


def _reaped_soon_after_an_outage(example: HandMadeHistory) -> None:
    """A lease is taken from a worker whose heartbeat hung for a third of a lease after the database was back."""
    at = _instead_of_the_kill(example)
    example.history.faults.append(Fault(kind="crash of Postgres", at=at + 1.5, until=at + 3.5))
    example.history.beats.append(Beat("w1", at + 1.6, at + 5.5, None))


def _reaped_after_a_moment(example: HandMadeHistory) -> None:
    """A lease is taken from a worker that was held up for a moment."""
    _instead_of_the_kill(example, lag=1.0)


def _reaped_too_soon(example: HandMadeHistory) -> None:
    """A lease is taken from a worker that was killed, but before it expired."""
    at = example.history.records["plain"].requested
    example.history.beats.append(Beat("w1", at + 2, at + 2.1, [("plain", 1)]))


def _reaped_after_a_cut(example: HandMadeHistory) -> None:
    """A lease is taken from a worker that had beaten again after it was cut off."""
    at = _instead_of_the_kill(example)
    example.history.beats.append(Beat("w1", at + 0.9, at + 0.95, [("plain", 1)]))
    example.history.faults.append(Fault(kind="partition", at=at + 0.1, until=at + 0.8, target="w1"))


@pytest.mark.parametrize(
    "make",
    [
        _reaped_after_an_outage, _reaped_soon_after_an_outage, _reaped_after_a_moment, _reaped_too_soon,
        _reaped_after_a_cut,
    ],
)  # fmt: skip
def test_reap_without_a_reason_is_caught(make: Callable[[HandMadeHistory], None]) -> None:
    """Proves L18: a breach is seen."""
    example = good()
    make(example)
    assert {violation.rule for violation in check(example.history)} == {"reaps_have_a_reason"}


def test_reap_of_a_worker_that_got_no_turn_for_half_a_lease_passes() -> None:
    """Proves L18 as far as the checker must not raise a false alarm for a machine that has other things to do."""
    example = good()
    _instead_of_the_kill(example, lag=2.5)
    assert [str(violation) for violation in check(example.history)] == []


def test_reap_of_a_worker_whose_heartbeat_got_no_answer_for_half_a_lease_passes() -> None:
    """Proves L18 as far as the database was there, and this worker did not reach it."""
    example = good()
    at = _instead_of_the_kill(example)
    example.history.beats = [Beat("w1", at + 0.9, at + 0.95, [("plain", 1)]), Beat("w1", at + 2, at + 4.5, None)]
    assert [str(violation) for violation in check(example.history)] == []
