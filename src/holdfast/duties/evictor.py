"""Evictor: keeps the snapshots within their bounds, and removes what dead builders left.

Above the high mark it removes down to the low one: leaves that are in nobody's plan, oldest, then largest, nothing that
was just made or used. A builder that finds no room asks for it at once; what cannot be had is `cache_full`.
"""

import asyncio
import logging
from pathlib import Path

from holdfast.errors import CacheFull
from holdfast.pipeline.snapshots import Folders, Made
from holdfast.store import Store

log = logging.getLogger(__name__)

HIGH, LOW = 0.9, 0.75
"""Shares of HOLDFAST_SNAPSHOTS_MAX_BYTES."""
JUST_USED = 600.0
"""Seconds in which nothing goes that was made or used: a job that found it may not have planned with it yet."""
FORGET = 3600.0
BATCH = 100


class Evictor:
    """Safe with two leaders: rows go one by one, under their lock, and folders after their rows."""

    def __init__(self, store: Store, folders: Folders, *, most: int | None, just_used: float = JUST_USED) -> None:
        self._store = store
        self._folders = folders
        self._most = most
        self._just_used = just_used

    async def run_once(self) -> int:
        """Evict a bounded batch and sweep; return how many snapshots and leftovers went."""
        gone = 0
        if self._most is not None and (await self._size()) > HIGH * self._most:
            while gone < BATCH and await self._size() > LOW * self._most and await self.evict():
                gone += 1
        await self._store.snapshots.forget_builds(FORGET)
        names = await asyncio.to_thread(self._folders.names)
        standing = await self._store.snapshots.standing(names)
        return gone + await asyncio.to_thread(self._folders.sweep, standing)

    async def evict(self) -> bool:
        """Remove the snapshot that is missed least; False if all must stay."""
        gone = await self._store.snapshots.evict(grace=self._just_used)
        if gone is None:
            return False
        log.info("evicted snapshot %s of task %s, %d bytes", gone.id, gone.task, gone.size)
        await asyncio.to_thread(self._folders.remove, gone.folder)
        return True

    async def copy(self, snapshot: str, workspace: Path) -> Made:
        """Copy a quiet workspace to a folder that waits for its row, with room made for it where that is needed."""
        if self._most is not None:
            await self._make_room(await asyncio.to_thread(self._folders.needs, workspace), self._most)
        while True:
            try:
                return await asyncio.to_thread(self._folders.copy, snapshot, workspace)
            except CacheFull:
                if not await self.evict():
                    raise

    async def _make_room(self, size: int, most: int) -> None:
        """See that so many bytes fit below the limit, or raise CacheFull. Builders at the same time may pass it."""
        while await self._size() + size > most:
            if size > most or not await self.evict():
                raise CacheFull(
                    f"a snapshot of {size} bytes does not fit: HOLDFAST_SNAPSHOTS_MAX_BYTES is {most}, and what "
                    "is there is in use or was just made; raise it, or remove snapshots"
                )

    async def _size(self) -> int:
        return (await self._store.snapshots.totals()).size
