"""Appends the events of one attempt (log, progress, usage, custom events) in numbered batches with the log's offsets.

Batch n is accepted only after batch n - 1, fenced by the lease: a retry after a lost reply duplicates nothing, and an
adopter continues exactly there.
"""

import asyncio
import logging
import sys
from collections.abc import Mapping

import msgspec

from holdfast.budgets import over_budget
from holdfast.errors import Invalid
from holdfast.model import Json, Lease, NewEvent
from holdfast.store import Store
from holdfast.store.events import Appended
from holdfast.worker.batch_writer import with_retries
from holdfast.worker.log_cap import LogCap

log = logging.getLogger(__name__)

Offsets = tuple[int, int]
MOST_AT_ONCE = 3 * 1024 * 1024
"""Bytes of events in one batch."""
MOST_WAITING = 16 * 1024 * 1024
"""Bytes of events buffered while the database is unavailable; events beyond that are dropped, with a note."""


class EventBatch(msgspec.Struct, frozen=True):
    """The content of one batch."""

    events: list[NewEvent]
    progress: Json = None
    deltas: Mapping[str, float] = {}
    log_bytes: int = 0


def _parts(events: list[NewEvent]) -> list[list[NewEvent]]:
    """Split events into batches below the size limit."""
    parts: list[list[NewEvent]] = [[]]
    size = 0
    for event in events:
        length = len(msgspec.json.encode(event.data))
        if parts[-1] and size + length > MOST_AT_ONCE:
            parts.append([])
            size = 0
        parts[-1].append(event)
        size += length
    return parts


class EventWriter:
    """Buffers events to append, and tracks what the record already has."""

    def __init__(self, store: Store, lease: Lease, *, log_max_bytes: int = sys.maxsize) -> None:
        adoption = lease.adoption
        self._store = store
        self._lease = lease
        self._batch = adoption.batch
        self._events: list[NewEvent] = []
        self._progress: Json = None
        self._deltas: dict[str, float] = {}
        self._log_bytes = 0
        self._waiting_bytes = 0
        self._overfull = False
        self._one_at_a_time = asyncio.Lock()
        self.committed: Offsets = (adoption.stdout_offset, adoption.stderr_offset)
        self.usage: Mapping[str, float] = lease.usage
        self.log_cap = LogCap(log_max_bytes)
        self._logged = 0
        self.lost = False

    async def continue_log(self) -> None:
        """Count what earlier attempts, or earlier owners of this one, added to the log: its cap is the job's."""
        lease = self._lease
        if lease.adopted or lease.attempt > 1:
            self.log_cap.kept = await with_retries(
                lambda: self._store.events.log_bytes(lease.id), "reading the size of the log"
            )

    def add(self, event: NewEvent, log_bytes: int = 0) -> None:
        self._events.append(event)
        self._log_bytes += log_bytes
        if event.type == "progress":
            self._progress = event.data
        elif event.type == "usage":
            self.charge(event.data)

    def charge(self, deltas: Mapping[str, float]) -> None:
        """Count usage, even if its event is dropped."""
        for name, value in deltas.items():
            self._deltas[name] = self._deltas.get(name, 0) + value

    def full(self, event: NewEvent) -> bool:
        """Return whether the buffer has no room for this event; the first time, add a note to the log."""
        self._waiting_bytes += len(msgspec.json.encode(event.data))
        if self._waiting_bytes <= MOST_WAITING:
            return False
        if not self._overfull:
            self._overfull = True
            self.add(
                NewEvent(
                    type="log", data={"stream": "stdout", "lines": ["[holdfast: events dropped: too many at once]"]}
                )
            )
        return True

    def note_cut(self) -> None:
        """Note once in the log that it was cut at its cap."""
        if (note := self.log_cap.note()) is not None:
            data = {"stream": "stdout", "lines": [f"[holdfast: {note}]"], "capped": True}
            self.add(NewEvent(type="log", data=data))

    @property
    def waiting(self) -> bool:
        return bool(self._events or self._deltas)

    async def flush(self, offsets: Offsets | None = None) -> bool:
        """Append the buffered events and advance the offsets. Return False, unchanged, if the lease is lost."""
        async with self._one_at_a_time:
            return await self._flush(offsets)

    async def _flush(self, offsets: Offsets | None) -> bool:
        offsets = offsets or self.committed
        if self.lost or (not self.waiting and offsets == self.committed):
            return not self.lost
        waiting = EventBatch(self._events, self._progress, self._deltas, self._log_bytes)
        self._events, self._progress, self._deltas, self._log_bytes = [], None, {}, 0
        self._waiting_bytes, self._overfull = 0, False
        parts = _parts(waiting.events)
        for n, events in enumerate(parts):
            last = n == len(parts) - 1
            part = (
                EventBatch(events, waiting.progress, waiting.deltas, waiting.log_bytes) if last else EventBatch(events)
            )
            if not await self._append(part, offsets if last else self.committed):
                return False
        self.log_cap.kept = self._logged + self._log_bytes
        return True

    async def _append(self, part: "EventBatch", offsets: Offsets) -> bool:
        """Append one batch. Events that the database rejects are dropped with a note; usage is always counted."""
        try:
            appended = await self._land(part, offsets)
        except Invalid as error:
            log.warning(
                "job %s: dropping %d events that the database rejected: %s", self._lease.id, len(part.events), error
            )
            text = f"[holdfast: {len(part.events)} events could not be kept]"
            note = NewEvent(type="log", data={"stream": "stdout", "lines": [text]})
            kept = [note, *(event for event in part.events if event.type == "usage")]
            rest = EventBatch(kept, deltas=part.deltas, log_bytes=part.log_bytes)
            appended = await self._land(rest, offsets)
        if appended.answer == "lost":
            self.lost = True
            return False
        self._batch += 1
        self.committed = offsets
        self.usage = appended.usage
        self._logged = appended.log_bytes
        return True

    async def _land(self, part: "EventBatch", offsets: Offsets) -> Appended:
        batch = self._batch + 1
        return await with_retries(
            lambda: self._store.events.append(
                self._lease,
                batch,
                part.events,
                offsets=offsets,
                old_offsets=self.committed,
                progress=part.progress,
                usage=part.deltas,
                log_bytes=part.log_bytes,
            ),
            "appending events",
        )

    def over_budget(self, budget: Mapping[str, float] | None) -> str | None:
        """Return which part of the budget is exceeded, or None."""
        return over_budget(self.usage, budget)
