"""Clears leases that expired, and pauses orphans that wear out every adopter. It doubts itself before it doubts others.

A reaper that is wrong takes work from workers that live. So it does nothing

- on its first pass, nor for a third of the TTL if that sees expired leases: the database may have been away until
  now, also for those who beat; and while heartbeats come from the future;
- for one TTL, in which every live worker beats, when a lease that looks expired was renewed, or looks as if it had
  expired before the last pass, which saw nothing: on SQLite the database's clock is this host's, and may be off;
- while its own view is stale: its look took long, its last pass failed or is long ago. If the database was away for us,
  it was away for those who beat; they get a third of the TTL, in which every live worker beats;
- for one TTL when wall clock and monotonic clock advanced differently: somebody set the clock, or the machine slept;
- for one TTL when most owners, and at least two, let their leases expire at once: that is more likely the database or
  the network than all of them. Once it has held, it reaps what is still expired.

A single worker that dies among others is reaped without delay.
"""

import logging

import msgspec

from holdfast.store import Store
from holdfast.store.leases import Owners
from holdfast.timing import Clock, SystemClock

log = logging.getLogger(__name__)

BATCH = 500
BEATS_PER_TTL = 3


class _Pass(msgspec.Struct, frozen=True):
    """What a pass saw, and when by the monotonic clock."""

    look: Owners
    at: float


class Reaper:
    """`interval` is how often it is meant to run; by it a pass knows that it comes late."""

    def __init__(self, store: Store, *, ttl: float, interval: float | None = None, clock: Clock | None = None) -> None:
        self._store = store
        self._ttl = ttl
        self._beat = ttl / BEATS_PER_TTL
        self._late = 3 * (self._beat if interval is None else interval)
        self._clock = clock or SystemClock()
        self._began = False
        self._before: _Pass | None = None
        self._hold_until = 0.0
        self._held_for_many = False

    async def run_once(self) -> int:
        """Reap one bounded batch; return how many leases were cleared."""
        # Nothing to compare with until this pass is through: one that fails is followed by one that only looks.
        before, self._before = self._before, None
        started = self._clock.monotonic()
        now = _Pass(await self._store.leases.owners(), self._clock.monotonic())
        reaped = 0
        if self._trusts_itself(started, now, before):
            reaped = len(await self._store.leases.reap(limit=BATCH)) if now.look.expired else 0
            await self._store.leases.abandon()
            if reaped < BATCH:
                now = _Pass(msgspec.structs.replace(now.look, expired=0, expired_beat_at=None), now.at)
        self._before = now
        return reaped

    def _trusts_itself(self, started: float, now: _Pass, before: _Pass | None) -> bool:
        if before is None:
            if self._began:
                self._hold(now, self._beat, "its last pass failed")
            elif now.look.expired:  # Whoever begins to lead after an outage has seen nothing of it.
                self._hold(now, self._beat, f"{now.look.expired} owners had expired before its first look")
            self._began = True
            return False
        if now.at - started > self._beat:
            self._hold(now, self._beat, f"its look took {now.at - started:.1f} s")
        if started - before.at > self._late:
            self._hold(now, self._beat, f"its last pass is {started - before.at:.1f} s ago")
        if abs(_drift(now, before)) > self._ttl / 2:
            self._hold(now, self._ttl, f"wall and monotonic clock drifted by {_drift(now, before):+.1f} s")
        many = now.look.expired > max(1, now.look.owners / 2)
        if many and not self._held_for_many:
            self._held_for_many = True
            self._hold(now, self._ttl, f"{now.look.expired} of {now.look.owners} owners expired at once")
        if self._clock_is_off(now.look, before.look):
            self._hold(now, self._ttl, "this host's clock disagrees with the heartbeats of live workers")
        if now.at < self._hold_until:
            return False
        self._held_for_many = many
        return True

    def _hold(self, now: _Pass, seconds: float, why: str) -> None:
        self._hold_until = max(self._hold_until, now.at + seconds)
        log.warning("not reaping for %.1f s: %s", self._hold_until - now.at, why)

    def _clock_is_off(self, look: Owners, before: Owners) -> bool:
        if look.beat_at is not None and (look.beat_at - look.now_at).total_seconds() > self._ttl:
            return True
        if look.expired_beat_at is None:
            return False
        if before.expired_beat_at is None:
            return (before.now_at - look.expired_beat_at).total_seconds() > self._ttl
        return look.expired_beat_at > before.expired_beat_at


def _drift(now: _Pass, before: _Pass) -> float:
    """By how much more the database's clock advanced than the monotonic one since the last pass."""
    return (now.look.now_at - before.look.now_at).total_seconds() - (now.at - before.at)
