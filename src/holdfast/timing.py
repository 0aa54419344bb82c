"""Time: the clock that tests can drive, and how long to wait.

Stored times come from the database's clock. What is here serves the SQLite store (whose database clock is the host's),
waits inside one process, and tests.
"""

import random
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
_EXACT = 4_000_000_000 * 1_000_000
"""Below this many microseconds a float of seconds still distinguishes single microseconds."""


class Clock(Protocol):
    """Two readings of time: `now` for what is stored, `monotonic` for durations."""

    def now(self) -> datetime: ...

    def monotonic(self) -> float: ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, start: datetime = datetime(2026, 1, 17, 9, tzinfo=UTC)) -> None:
        self._now = start
        self._monotonic = 0.0

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)
        self._monotonic += max(seconds, 0.0)


def to_micros(at: datetime) -> int:
    return (at - EPOCH) // MICROSECOND


def from_micros(micros: int) -> datetime:
    if abs(micros) < _EXACT:
        return datetime.fromtimestamp(micros / 1_000_000, UTC)  # a third of the cost of a sum with EPOCH
    return EPOCH + timedelta(microseconds=micros)


LONGEST = 10 * 366 * 86_400
"""The longest duration that a job may ask for, in seconds."""


def backoff(n: int, *, base: float, cap: float) -> float:
    """Return the wait before try n + 1, in seconds: base, 2·base, 4·base … up to cap."""
    if n < 1:
        raise ValueError(f"backoff counts from 1, not {n}")
    return min(cap, base * 2.0 ** min(n - 1, 60))


def jitter(seconds: float, share: float = 0.1, source: random.Random | None = None) -> float:
    """Return seconds, moved by at most `share` in either direction, so that many do not wait in step."""
    return seconds * (1 + (source or random).uniform(-share, share))
