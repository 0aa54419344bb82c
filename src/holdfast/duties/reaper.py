"""Clears expired leases, and pauses orphans at which every adopter failed. It suspects itself before the workers.

A reaper that is wrong takes jobs from live workers. So it does nothing

- for two thirds of the TTL after its first pass: the database may have been down until now, for the workers as well;
  and while heartbeats have times in the future;
- for one TTL, in which every live worker beats, if a lease that looks expired was renewed, or looks as if it had
  expired before the last pass, which saw nothing: on SQLite the database's clock is this host's and may be wrong;
- while its own view is stale: its query took long, its last pass failed or is long ago, or this process could not write
  for a while (on SQLite reads work while another process keeps the write lock). If the database was down for us, it was
  down for the workers. They get two thirds of the TTL, in which every live worker beats: a heartbeat that hung when the
  database came back times out after one third, and the next follows within a quarter of the other;
- for one TTL if wall clock and monotonic clock advanced differently: the clock was set, or the machine slept;
- for one TTL if most owners, and at least two, let their leases expire at once: that is more likely a fault of the
  database or the network than of all of them. After that it reaps the leases that are still expired.

A single worker that dies among others is reaped without delay. Only leases that had expired when the pass looked are
reaped, however long the statement waits for a lock.
"""

import logging
from collections.abc import Callable

import msgspec

from holdfast.store import Store
from holdfast.store.leases import Owners
from holdfast.timing import Clock, SystemClock

log = logging.getLogger(__name__)

BATCH = 500
BEATS_PER_TTL = 3


class _Pass(msgspec.Struct, frozen=True):
    """What a pass saw, and when, by the monotonic clock."""

    owners: Owners
    at: float


class Reaper:
    """`interval` is the intended time between passes, to detect a late pass.

    `stuck` returns for how long a frequent write of this process has been overdue.
    """

    def __init__(
        self,
        store: Store,
        *,
        ttl: float,
        interval: float | None = None,
        clock: Clock | None = None,
        stuck: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._store = store
        self._ttl = ttl
        self._beat = ttl / BEATS_PER_TTL
        self._patience = 2 * self._beat
        self._late = 3 * (self._beat if interval is None else interval)
        self._clock = clock or SystemClock()
        self._stuck = stuck
        self._began = False
        self._doubted = False
        self._before: _Pass | None = None
        self._wait_until = 0.0
        self._waited_for_many = False

    def doubt(self, stuck: float) -> None:
        """Note that a write of this process was late by `stuck` seconds: if that is much, its last pass is stale."""
        self._doubted = self._doubted or stuck > self._beat

    async def run_once(self) -> int:
        """Reap one bounded batch; return how many leases were cleared."""
        # Nothing to compare with until this pass has succeeded: after a failed pass, the next one only looks.
        before, self._before = None if self._doubted else self._before, None
        self._doubted = False
        started = self._clock.monotonic()
        now = _Pass(await self._store.leases.owners(), self._clock.monotonic())
        reaped = 0
        if self._trusts_itself(started, now, before):
            seen = now.owners.now_at
            reaped = len(await self._store.leases.reap(limit=BATCH, seen=seen)) if now.owners.expired else 0
            if reaped < BATCH:
                now = _Pass(msgspec.structs.replace(now.owners, expired=0, expired_beat_at=None), now.at)
        await self._store.leases.abandon()  # This goes by a count, not by a clock, so it is always safe.
        self._before = now
        return reaped

    def _trusts_itself(self, started: float, now: _Pass, before: _Pass | None) -> bool:
        if before is None:
            self._wait(now, self._patience, "the last pass failed" if self._began else "this is the first pass")
            self._began = True
            return False
        if now.at - started > self._beat:
            self._wait(now, self._patience, f"the query took {now.at - started:.1f} s")
        if started - before.at > self._late:
            self._wait(now, self._patience, f"the last pass was {started - before.at:.1f} s ago")
        if self._stuck() > self._beat:
            self._wait(now, self._patience, f"this process could not write for {self._stuck():.1f} s")
        if abs(_drift(now, before)) > self._ttl / 2:
            self._wait(now, self._ttl, f"wall and monotonic clock drifted by {_drift(now, before):+.1f} s")
        many = now.owners.expired > max(1, now.owners.owners / 2)
        if many and not self._waited_for_many:
            self._waited_for_many = True
            self._wait(now, self._ttl, f"{now.owners.expired} of {now.owners.owners} owners expired at once")
        if self._clock_is_off(now.owners, before.owners):
            self._wait(now, self._ttl, "this host's clock disagrees with the heartbeats of live workers")
        if now.at < self._wait_until:
            return False
        self._waited_for_many = many
        return True

    def _wait(self, now: _Pass, seconds: float, why: str) -> None:
        self._wait_until = max(self._wait_until, now.at + seconds)
        if now.owners.expired:
            log.warning(
                "leases of %d of %d owners look expired; waiting %.1f s before any is reaped: %s",
                now.owners.expired,
                now.owners.owners,
                self._wait_until - now.at,
                why,
            )

    def _clock_is_off(self, owners: Owners, before: Owners) -> bool:
        if owners.beat_at is not None and (owners.beat_at - owners.now_at).total_seconds() > self._ttl:
            return True
        if owners.expired_beat_at is None:
            return False
        if before.expired_beat_at is None:
            return (before.now_at - owners.expired_beat_at).total_seconds() > self._ttl
        return owners.expired_beat_at > before.expired_beat_at


def _drift(now: _Pass, before: _Pass) -> float:
    """Return by how much more the database's clock advanced than the monotonic one since the last pass."""
    return (now.owners.now_at - before.owners.now_at).total_seconds() - (now.at - before.at)
