"""Evictor: keeps the snapshots below their size limit, and removes what dead builders left.

Above the high watermark it evicts down to the low one: leaves that are in no plan, oldest first, then largest, but none
that was just made or used. A builder without space calls it directly, and gets `cache_full` if nothing can go.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from holdfast.errors import CacheFull
from holdfast.pipeline.snapshots import CopiedFolder, SnapshotFolders
from holdfast.store import Store

T = TypeVar("T")
log = logging.getLogger(__name__)

HIGH, LOW = 0.9, 0.75
"""Shares of HOLDFAST_SNAPSHOTS_MAX_BYTES."""
JUST_USED = 600.0
"""Seconds for which a snapshot is kept after it was made or used: a job that found it may not have planned yet."""
FORGET = 3600.0
BATCH = 100


class Evictor:
    """Safe with two leaders: rows are deleted one by one, under their lock, and folders after their rows."""

    def __init__(
        self,
        store: Store,
        folders: SnapshotFolders,
        *,
        most: int | None,
        just_used: float = JUST_USED,
        shortage: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`shortage` is called in a thread; it returns why nothing may be written although the disk has space."""
        self._shortage = shortage
        self._store = store
        self._folders = folders
        self._most = most
        self._just_used = just_used

    async def run_once(self) -> int:
        """Evict a bounded batch and sweep; return how many snapshots and leftovers were removed."""
        gone = 0
        if self._most is not None and (await self._size()) > HIGH * self._most:
            while gone < BATCH and await self._size() > LOW * self._most and await self.evict():
                gone += 1
        await self._store.snapshots.prune_builds(FORGET)
        names = await asyncio.to_thread(self._folders.names)
        stored = await self._store.snapshots.stored_folders(names)
        return gone + await asyncio.to_thread(self._folders.sweep, stored)

    async def evict(self) -> bool:
        """Remove the least needed snapshot. Return False if all must stay."""
        gone = await self._store.snapshots.evict(grace=self._just_used)
        if gone is None:
            return False
        log.info("evicted snapshot %s of task %s, %d bytes", gone.id, gone.task, gone.size)
        await asyncio.to_thread(self._folders.remove, gone.folder)
        return True

    async def copy(self, snapshot: str, workspace: Path, outputs: Path | None = None, *, more: int = 0) -> CopiedFolder:
        """Copy a quiet workspace to a folder that has no row yet, evicting snapshots to make space if needed.

        `outputs` are moved next to the copy (see SnapshotFolders.copy); `more` is their size in bytes.
        """
        if self._most is not None:
            await self._make_room(await asyncio.to_thread(self._folders.needs, workspace) + more, self._most)
        return await self.with_room(lambda: asyncio.to_thread(self._folders.copy, snapshot, workspace, outputs))

    async def with_room(self, make: Callable[[], Awaitable[T]]) -> T:
        """Make something on the disk of the snapshots; while that disk is full, evict and try again."""
        while True:
            try:
                if (why := await asyncio.to_thread(self._shortage)) is not None:
                    raise CacheFull(why)
                return await make()
            except CacheFull:
                if not await self.evict():
                    raise

    async def _make_room(self, size: int, most: int) -> None:
        """Evict until `size` more bytes fit below the limit, or raise CacheFull. Concurrent builders may exceed it."""
        while await self._size() + size > most:
            if size > most or not await self.evict():
                raise CacheFull(
                    f"a snapshot of {size} bytes does not fit: HOLDFAST_SNAPSHOTS_MAX_BYTES is {most}, and the "
                    "existing snapshots are in use or were just made; raise it, or remove snapshots"
                )

    async def _size(self) -> int:
        return (await self._store.snapshots.totals()).size
