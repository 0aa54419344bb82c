"""Appends the events of one attempt: log, progress, usage and its own, in numbered batches with the log's offsets.

Batch n lands only behind batch n - 1, fenced by the lease: a retry after a lost answer repeats nothing, and whoever
adopts the attempt goes on exactly there.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from holdfast.model import Json, Lease, NewEvent
from holdfast.store import Store
from holdfast.worker.completer import retried

Offsets = tuple[int, int]


class Journal:
    """What waits to be appended, and how far the record is."""

    def __init__(self, store: Store, lease: Lease) -> None:
        adoption = lease.adoption
        self._store = store
        self._lease = lease
        self._batch = adoption.batch
        self._events: list[NewEvent] = []
        self._progress: Json = None
        self._deltas: dict[str, float] = {}
        self._log_bytes = 0
        self._cut = False
        self._one_at_a_time = asyncio.Lock()
        self.committed: Offsets = (adoption.stdout_offset, adoption.stderr_offset)
        self.usage: Mapping[str, float] = lease.usage
        self.logged = 0
        """Bytes of log in the job's record, over all attempts, as far as we know."""
        self.lost = False

    def add(self, event: NewEvent, log_bytes: int = 0) -> None:
        self._events.append(event)
        self._log_bytes += log_bytes
        if event.type == "progress":
            self._progress = event.data
        elif event.type == "usage":
            for name, value in event.data.items():
                self._deltas[name] = self._deltas.get(name, 0) + value

    def cut(self, size: int, cap: int) -> bool:
        """Say whether so much more log is over the cap; the first time, a mark says so in the log."""
        if self.logged + self._log_bytes + size <= cap:
            return False
        if not self._cut:
            self._cut = True
            text = f"[holdfast: the log is over {cap} bytes; what follows is not kept]"
            self.add(NewEvent(type="log", data={"stream": "stdout", "lines": [text], "capped": True}))
        return True

    @property
    def waiting(self) -> bool:
        return bool(self._events)

    async def flush(self, offsets: Offsets | None = None) -> bool:
        """Append what waits, and move the offsets; False when the lease is lost, and then nothing changed."""
        async with self._one_at_a_time:
            return await self._flush(offsets)

    async def _flush(self, offsets: Offsets | None) -> bool:
        offsets = offsets or self.committed
        if self.lost or (not self._events and offsets == self.committed):
            return not self.lost
        events, self._events = self._events, []
        progress, self._progress = self._progress, None
        deltas, self._deltas = self._deltas, {}
        log_bytes, self._log_bytes = self._log_bytes, 0
        batch = self._batch + 1
        appended = await retried(
            lambda: self._store.events.append(
                self._lease,
                batch,
                events,
                offsets=offsets,
                old_offsets=self.committed,
                progress=progress,
                usage=deltas,
                log_bytes=log_bytes,
            ),
            "an append",
        )
        if appended.answer == "lost":
            self.lost = True
            return False
        self._batch = batch
        self.committed = offsets
        self.usage = appended.usage
        self.logged = appended.log_bytes
        return True

    def over_budget(self, budget: Mapping[str, float] | None) -> str | None:
        """Say what was used beyond the budget, or None."""
        for name, most in (budget or {}).items():
            used: Any = self.usage.get(name, 0)
            if used > most:
                return f"used {used:g} {name} of {most:g}"
        return None
