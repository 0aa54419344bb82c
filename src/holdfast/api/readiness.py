"""Whether this service can accept jobs: the database accepts a write, and the disks have space.

Probes need no token, so they cause at most one write a second, however many arrive.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from holdfast.errors import DiskFull, HoldfastError, NotReady, StoreFull
from holdfast.runner.disk import DATABASE, SHARED, Disks
from holdfast.store import Store

log = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""How long an answer is reused."""
NO_ROOM = "the disk of the database is full; make room, or delete jobs with force"
NO_WRITE = "the database accepts no writes; see this server's log"


class Readiness:
    def __init__(self, store: Store, disks: Disks) -> None:
        self._store = store
        self._disks = disks
        self._asking = asyncio.Lock()
        self._asked = float("-inf")
        self._problem: str | None = None

    async def check(self) -> Sequence[str]:
        """Raise NotReady if no job could be accepted now; return warnings about what else is wrong."""
        async with self._asking:
            if time.monotonic() - self._asked >= FRESH_SECONDS:
                self._problem = await self._ask()
                self._asked = time.monotonic()
        if self._problem is not None:
            raise NotReady(self._problem)
        low = self._disks.low
        return [low[SHARED]] if SHARED in low else []

    async def _ask(self) -> str | None:
        low = await self._disks.look()
        if DATABASE in low:
            return low[DATABASE]
        try:
            await self._store.test_write()
        except HoldfastError as error:
            log.warning("a test write to the database failed, so /readyz answers 503: %s", error.message)
            return NO_ROOM if isinstance(error, StoreFull) else NO_WRITE
        return None

    async def require_room(self, *disks: str) -> None:
        """Refuse a request that needs space on a disk below the reserve."""
        low = await self._disks.look()
        for name in disks:
            if name in low:
                raise DiskFull(low[name])
