"""The verdict of a soak: what is flat, what grows, and that retention acts early enough for the one to be told from the
other."""

import pytest
from torture.samples import CONNECTIONS, DEAD, MEMORY, ROOM, TABLES, Samples
from torture.soak import Course

SECONDS = 400.0


def measured(panel: str, *quarters: float) -> Samples:
    """Samples of a line that has one value in each quarter of the time."""
    samples = Samples()
    for second in range(0, int(SECONDS), 10):
        samples.add(panel, "line", quarters[int(4 * second / SECONDS)], at=float(second))
    return samples


def flat(samples: Samples) -> bool:
    (drift,) = samples.drifts(SECONDS)
    assert str(drift).startswith("flat " if drift.flat else "GROWS")
    return drift.flat


@pytest.mark.parametrize("panel", ROOM)
def test_line_that_stays_is_flat_and_one_that_doubles_grows(panel: str) -> None:
    """A leak in whatever is measured is seen."""
    assert flat(measured(panel, 1000, 1000, 1000, 1000))
    assert not flat(measured(panel, 1000, 1000, 2000, 3000))


def test_what_is_measured_in_the_first_quarter_counts_for_nothing() -> None:
    assert flat(measured(TABLES, 1, 50, 50, 50))


def test_slow_leak_of_memory_is_seen() -> None:
    assert not flat(measured(MEMORY, 60, 70, 73, 76))


def test_what_shrinks_is_flat() -> None:
    assert flat(measured(DEAD, 100_000, 20_000, 10_000, 5_000))


def test_line_that_was_not_there_early_has_no_drift() -> None:
    samples = Samples()
    samples.add(CONNECTIONS, "late", 3.0, at=SECONDS - 1)
    assert not samples.drifts(SECONDS)


@pytest.mark.parametrize("minutes", [2, 4, 30, 600])
def test_retention_and_autovacuum_act_well_within_the_first_fifth(minutes: int) -> None:
    course = Course(minutes * 60.0)
    assert course.keep + 2 * course.vacuum + course.every < course.seconds / 5


def test_each_quarter_has_the_same_pauses() -> None:
    course = Course(SECONDS)
    quarters = [[course.pauses(n * 100 + at / 10) for at in range(1000)] for n in range(4)]
    shares = [sum(quarter) / len(quarter) for quarter in quarters]
    assert shares == pytest.approx([0.1] * 4, abs=0.01)
