"""Fan-out of job events: one reader for any number of followers.

`Fanout` reads the heads of all followed jobs in one statement, a few times a second. The events of a job are read once,
in blocks that all its followers share; blocks are dropped when they use too much memory and read again when a follower
still needs them. A follower is only a cursor.
"""

import asyncio
import contextlib
import logging
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from typing import Literal

import msgspec

from holdfast.errors import Invalid, NotFound, StoreError
from holdfast.model import Event
from holdfast.store import Store
from holdfast.store.events import Head
from holdfast.store.outage import level_of
from holdfast.timing import jitter

log = logging.getLogger(__name__)

Form = Literal["sse", "ndjson"]

POLL_SECONDS = 0.1
BLOCK = 64
"""Events of one block. A log event has up to 64 KiB."""
KEPT_BYTES = 32 * 1024 * 1024
PIECE_BYTES = 32 * 1024
"""The most bytes that a follower sends at once, unless a single event is larger."""
READS_AT_ONCE = 4
PIECES = 8
"""Joined pieces that a block keeps for others at the same cursor."""


class Block:
    """Consecutive events as text, ready for every form. A block only grows, up to its size."""

    def __init__(self, number: int) -> None:
        self.first = number * BLOCK
        self.seqs: list[int] = []
        self.size = 0
        self.counted = 0
        self.told_at = 0.0
        """When its last event happened, in seconds since the epoch."""
        self._lines: list[tuple[str, bytes]] = []
        self._pieces: dict[tuple[Form, int], tuple[bytes, int]] = {}

    @property
    def last(self) -> int:
        return self.seqs[-1] if self.seqs else self.first

    def extend(self, events: Iterable[Event]) -> None:
        for event in events:
            line = msgspec.json.encode(event)
            self.seqs.append(event.seq)
            self._lines.append((" ".join(event.type.split()), line))
            self.size += len(line)
            self.told_at = event.at.timestamp()
        self._pieces.clear()

    def piece(self, form: Form, cursor: int) -> tuple[bytes, int]:
        """Return the events after the cursor, up to a size, and the new cursor; callers share the same bytes."""
        found = self._pieces.get((form, cursor))
        if found is None:
            start = end = bisect_right(self.seqs, cursor)
            size = 0
            while end < len(self._lines) and (end == start or size + len(self._lines[end][1]) <= PIECE_BYTES):
                size += len(self._lines[end][1])
                end += 1
            if len(self._pieces) >= PIECES:
                self._pieces.clear()
            text = b"".join(self._frame(form, n) for n in range(start, end))
            found = self._pieces[form, cursor] = (text, self.seqs[end - 1] if end > start else cursor)
        return found

    def _frame(self, form: Form, n: int) -> bytes:
        type, line = self._lines[n]
        if form == "ndjson":
            return line + b"\n"
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (self.seqs[n], type.encode(), line)


class Follower:
    """One client's cursor in a history, and the event that wakes it."""

    def __init__(self, feed: "Feed", cursor: int) -> None:
        self.feed = feed
        self.cursor = cursor
        self.woken = asyncio.Event()
        self.gone = False
        self.cut = False

    def leave(self) -> None:
        self.gone = True
        self.woken.set()


class Feed:
    """One followed job: the head of its history, and its followers. Without a head the job was deleted."""

    def __init__(self, fanout: "Fanout", job_id: str, head: Head) -> None:
        self.job_id = job_id
        self.tenant = head.tenant
        self.head: Head | None = head
        self.followers: set[Follower] = set()
        self._fanout = fanout
        self._lock = asyncio.Lock()

    def tell(self, head: Head | None) -> bool:
        """Store a new head; return whether it differs from the last."""
        if head is not None and head.tenant != self.tenant:
            head = None
        changed, self.head = head != self.head, head
        return changed

    def wake(self) -> None:
        for follower in self.followers:
            follower.woken.set()

    async def block(self, number: int) -> Block:
        """Return the block as far as it is written; the first follower that needs it reads it for all."""
        if self._whole(block := self._fanout.kept(self.job_id, number)):
            return block
        async with self._lock:
            if self._whole(block := self._fanout.kept(self.job_id, number)):
                return block
            self._fanout.reads += 1
            limit = BLOCK - len(block.seqs)
            page = await self._fanout.store.events.page(self.job_id, tenant=self.tenant, after=block.last, limit=limit)
            block.extend(page.items)
            self._fanout.keep(self.job_id, number, block)
            return block

    def _whole(self, block: Block) -> bool:
        return len(block.seqs) == BLOCK or (self.head is not None and block.last >= self.head.seq)


class Fanout:
    """All followed jobs of this server."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reads = 0
        self.polls = 0
        self.cut = 0
        """Clients disconnected because they read nothing for too long."""
        self.lag = 0.0
        """Seconds between the last event that was read and its reading, by this host's clock."""
        self._feeds: dict[str, Feed] = {}
        self._blocks: OrderedDict[tuple[str, int], Block] = OrderedDict()
        self.kept_bytes = 0
        self._work = asyncio.Event()
        self._stopping = False

    @property
    def followers(self) -> int:
        return sum(len(feed.followers) for feed in self._feeds.values())

    async def run(self) -> None:
        """Poll the followed jobs forever; without followers, wait for the first."""
        while True:
            if not self._feeds:
                self._work.clear()
            await self._work.wait()
            try:
                await self.poll()
            except StoreError as error:
                log.log(level_of(error), "streams wait for the database: %s", error)
                await asyncio.sleep(1.0)
            except Exception:
                log.exception("reading the followed jobs failed; retrying")
                await asyncio.sleep(1.0)
            await asyncio.sleep(jitter(POLL_SECONDS))

    async def poll(self) -> None:
        """Find which followed jobs have new events, read them, and wake their followers."""
        self.polls += 1
        feeds = list(self._feeds.values())
        heads = await self.store.events.heads([feed.job_id for feed in feeds])
        changed = [feed for feed in feeds if feed.tell(heads.get(feed.job_id))]
        for n in range(0, len(changed), READS_AT_ONCE):
            await asyncio.gather(*(self._bring(feed) for feed in changed[n : n + READS_AT_ONCE]))

    async def _bring(self, feed: Feed) -> None:
        """Read the new events of one job and wake its followers, even if reading fails: they then read themselves."""
        try:
            if feed.head is not None and any(follower.cursor < feed.head.seq for follower in feed.followers):
                block = await feed.block((feed.head.seq - 1) // BLOCK)
                self.lag = max(0.0, time.time() - block.told_at)
        except (NotFound, StoreError) as error:
            log.info("could not read new events of job %s; its followers retry: %s", feed.job_id, error)
        finally:
            feed.wake()

    def stop(self) -> None:
        """End every stream without its `end` event, so that clients reconnect, to the next server."""
        self._stopping = True
        for feed in self._feeds.values():
            for follower in feed.followers:
                follower.cut = True
                follower.leave()

    @contextlib.asynccontextmanager
    async def follow(self, job_id: str, *, tenant: str, after: int) -> AsyncIterator[Follower]:
        """Follow a job inside the block."""
        feed = await self._feed(job_id, tenant, after)
        follower = Follower(feed, after)
        feed.followers.add(follower)
        self._feeds[job_id] = feed
        self._work.set()
        if self._stopping:
            follower.cut = True
            follower.leave()
        try:
            yield follower
        finally:
            feed.followers.discard(follower)
            if not feed.followers and self._feeds.get(job_id) is feed:
                del self._feeds[job_id]
                for key in [key for key in self._blocks if key[0] == job_id]:
                    self._drop(key)

    async def _feed(self, job_id: str, tenant: str, after: int) -> Feed:
        feed = self._feeds.get(job_id)
        if feed is not None and feed.head is not None and after <= feed.head.seq and feed.tenant == tenant:
            return feed
        head = (await self.store.events.heads([job_id])).get(job_id)
        if head is None or head.tenant != tenant:
            raise NotFound("job", job_id)
        if after > head.seq:
            raise Invalid("after", f"{after} is past the last event, {head.seq}")
        feed = self._feeds.get(job_id) or Feed(self, job_id, head)
        if feed.head is None or feed.tenant != tenant:  # Deleted, and created again with the same id.
            feed = Feed(self, job_id, head)
        return feed

    def kept(self, job_id: str, number: int) -> Block:
        block = self._blocks.get((job_id, number))
        if block is None:
            return Block(number)
        self._blocks.move_to_end((job_id, number))
        return block

    def keep(self, job_id: str, number: int, block: Block) -> None:
        """Keep a block for other followers, unless the last one has left while it was read."""
        if job_id not in self._feeds:
            return
        self._blocks[job_id, number] = block
        self._blocks.move_to_end((job_id, number))
        self.kept_bytes += block.size - block.counted
        block.counted = block.size
        while self.kept_bytes > KEPT_BYTES and len(self._blocks) > 1:
            self._drop(next(iter(self._blocks)))

    def _drop(self, key: tuple[str, int]) -> None:
        block = self._blocks.pop(key)
        self.kept_bytes -= block.counted
        block.counted = 0
