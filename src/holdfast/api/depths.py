"""The depths of queues: counted for each answer while that is quick, else kept fresh in the background.

A count reads every waiting job. Up to `FEW` jobs that takes milliseconds, and every answer is exact. With a million it
takes half a second: then a background task counts repeatedly, rests four times as long as a count takes, and answers
are at most `MOST_AGE` seconds old. The task stops when no request has asked for a while.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.duties.scheduler import every
from holdfast.store import Store
from holdfast.store.queues import Depth

FEW = 50_000
"""Up to this many jobs are counted for each answer: about 20 ms."""
MOST_AGE = 10.0
REST = 4.0
"""The rest after a count, as a multiple of its duration, if `MOST_AGE` allows it."""
ASKED_WITHIN = 900.0
"""How long counting continues after the last request: a scraper comes back."""


@dataclass(frozen=True)
class QueueCounts:
    """The result of a count, when it began by the monotonic clock, and how long it took."""

    depths: Sequence[Depth]
    began: float
    took: float

    @property
    def quick(self) -> bool:
        return sum(depth.waiting for depth in self.depths) <= FEW

    @property
    def age(self) -> float:
        return time.monotonic() - self.began


class DepthCounter:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: QueueCounts | None = None
        self._asked = -ASKED_WITHIN
        self._counting = asyncio.Lock()
        self._slow = asyncio.Event()
        """Set while the background task has something to do."""

    async def get(self) -> QueueCounts:
        """Return the depths of all queues: exact while a count is quick, else at most `MOST_AGE` seconds old."""
        self._asked = time.monotonic()
        if self._last is None or self._last.quick or self._last.age > MOST_AGE:
            return await self._count(since=self._asked)
        self._slow.set()
        return self._last

    async def run(self) -> None:
        """Keep the counts fresh while they are slow and requested; survive a database outage."""
        await every(0.0, self._refresh)

    async def _refresh(self) -> None:
        await self._slow.wait()
        took = self._last.took if self._last is not None else 0.0
        await asyncio.sleep(min(REST * took, max(0.0, MOST_AGE - 1.0 - 2 * took)))
        counted = await self._count(since=time.monotonic())
        if counted.quick or time.monotonic() - self._asked > ASKED_WITHIN:
            self._slow.clear()

    async def _count(self, *, since: float) -> QueueCounts:
        """Count, or return the count that another caller began after `since`."""
        async with self._counting:
            if self._last is not None and self._last.began >= since:
                return self._last
            began = time.monotonic()
            depths = await self._store.queues.depths()
            self._last = QueueCounts(depths, began, time.monotonic() - began)
            if not self._last.quick:
                self._slow.set()
            return self._last
