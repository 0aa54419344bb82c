"""Clears leases that expired, and pauses orphans that wear out every adopter.

It doubts its own clock, which on SQLite is this host's: nothing on the first pass, nothing while heartbeats come from
the future, nothing while a lease that looks expired is still being renewed.
"""

import logging

from holdfast.store import Store
from holdfast.store.leases import Owners

log = logging.getLogger(__name__)

BATCH = 500


class Reaper:
    def __init__(self, store: Store, *, ttl: float) -> None:
        self._store = store
        self._ttl = ttl
        self._before: Owners | None = None

    async def run_once(self) -> int:
        """Reap one bounded batch; return how many leases were cleared."""
        look, before = await self._store.leases.owners(), self._before
        self._before = look
        if before is None:
            return 0
        if self._clock_is_off(look, before):
            log.warning("not reaping: this host's clock disagrees with the heartbeats of live workers")
            return 0
        reaped = await self._store.leases.reap(limit=BATCH) if look.expired else ()
        await self._store.leases.abandon()
        return len(reaped)

    def _clock_is_off(self, look: Owners, before: Owners) -> bool:
        behind = look.beat_at is not None and (look.beat_at - look.now_at).total_seconds() > self._ttl
        ahead = (
            look.expired_beat_at is not None
            and before.expired_beat_at is not None
            and look.expired_beat_at > before.expired_beat_at
        )
        return behind or ahead
