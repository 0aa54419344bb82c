"""Watches the histories of jobs on the database: one statement for all that this program waits for.

The reads wait out an unreachable database, as the HTTP clients wait for a server: one warning when it goes away, one
when it is back, an error after a quarter of an hour.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from holdfast.errors import Invalid, NotFound, StoreUnreachable
from holdfast.store import Store
from holdfast.store.events import Head
from holdfast.timing import backoff, jitter

log = logging.getLogger(__name__)

T = TypeVar("T")
POLL_SECONDS = 0.05
RECONNECT_SECONDS = 15 * 60.0


class HeadWatch:
    """The heads of the histories that somebody waits for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[str, list[tuple[int, asyncio.Future[Head | None]]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._away = False

    async def after(self, job_id: str, tenant: str, seq: int) -> Head:
        """Wait until a job's history is longer than `seq`; return its new head. Raise NotFound if it is deleted."""
        found: asyncio.Future[Head | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, []).append((seq, found))
        if self._reader is None or self._reader.done():
            # Reason for a bare task: it serves all callers, and ends when none waits. `close` awaits it.
            self._reader = asyncio.create_task(self._read_all())
        head = await found
        if head is None or head.tenant != tenant:
            raise NotFound("job", job_id)
        return head

    async def close(self) -> None:
        """End the reader; who still waits gets an error."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        self._fail(Invalid("app", "was closed while a job was waited for"))

    def _fail(self, error: Exception) -> None:
        for waiting in self._waiting.values():
            for _, found in waiting:
                if not found.done():
                    found.set_exception(error)
        self._waiting.clear()

    async def _read_all(self) -> None:
        while self._waiting:
            try:
                heads = await self.retried(lambda: self._store.events.heads(list(self._waiting)))
            except Exception as error:
                self._fail(error)
                return
            for job_id in list(self._waiting):
                self._tell(job_id, heads.get(job_id))
            if self._waiting:
                await asyncio.sleep(jitter(POLL_SECONDS))

    def _tell(self, job_id: str, head: Head | None) -> None:
        """Answer those whose job has moved on; drop those who no longer wait."""
        left = []
        for seq, found in self._waiting[job_id]:
            if found.done():
                continue
            if head is None or head.seq > seq:
                found.set_result(head)
            else:
                left.append((seq, found))
        if left:
            self._waiting[job_id] = left
        else:
            del self._waiting[job_id]

    async def retried(self, read: Callable[[], Awaitable[T]]) -> T:
        """Read; while the database is unreachable, try again, for up to a quarter of an hour."""
        since, failures = time.monotonic(), 0
        while True:
            try:
                found = await read()
            except StoreUnreachable as error:
                if time.monotonic() - since >= RECONNECT_SECONDS:
                    raise
                if not self._away:
                    self._away = True
                    log.warning("cannot reach the database (%s); retrying for up to 15 minutes", error)
                failures += 1
                await asyncio.sleep(jitter(backoff(failures, base=0.1, cap=2.0)))
            else:
                if self._away:
                    self._away = False
                    log.warning("the database is back")
                return found
