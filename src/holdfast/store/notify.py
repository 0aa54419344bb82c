"""Notifications: a hint that something may have changed, never the change itself.

Inside a process they arrive at once. To other processes the first is sent at once too; those that follow within a few
milliseconds are sent together. A process that misses one finds the work by polling.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from holdfast.errors import StoreError
from holdfast.store.database import Database

DEBOUNCE_SECONDS = 0.003

STOP = "stop"
ORPHAN = "orphan"
ANY_WORK = "work"
"""Some queue has something to claim: sent by the SQL function that submits in a caller's transaction."""
SORTS_LAST = "sorts_last"
"""Sent with topics that are only about new jobs, which sort after all waiting ones."""


def work_topic(queue: str) -> str:
    """Return the topic of a queue that has something to claim."""
    return f"work:{queue}"


class TopicSignal:
    """Collects topics until a caller waits for them."""

    def __init__(self) -> None:
        self._topics: set[str] = set()
        self._event = asyncio.Event()

    def set(self, topics: Iterable[str]) -> None:
        self._topics.update(topics)
        self._event.set()

    async def wait(self, timeout: float) -> frozenset[str]:
        """Return the topics received since the last call, or none after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._event.wait()
        self._event.clear()
        topics, self._topics = frozenset(self._topics), set()
        return topics


class Notifications:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._signals: set[TopicSignal] = set()
        self._pending: set[str] = set()
        self._pending_returns = 0
        self._sender: asyncio.Task[None] | None = None
        self.returns = 0
        """How often a job may have become claimable that sorts before the last claimed one.

        The next claim then scans from the start.
        """

    def reserve(self) -> bool:
        """Return whether a caller may send its notification with its own commit: the first one of a few milliseconds.

        That saves a commit. Such commits wait for each other in Postgres, so there is one of them at a time.
        """
        if self._sender is not None:
            return False
        self._sender = asyncio.create_task(self._send(DEBOUNCE_SECONDS))
        return True

    def post(self, topics: Iterable[str], *, sorts_last: bool = False, sent: bool = False) -> None:
        """Notify this process at once, and the others within milliseconds, unless the notification was `sent` already.

        `sorts_last` says that it is only about new jobs, which sort after all waiting ones.
        """
        topics = set(topics)
        if not topics:
            return
        if not sorts_last:
            self.returns += 1
        for signal in self._signals:
            signal.set(topics)
        if sent:
            return
        self._pending |= topics
        self._pending_returns += not sorts_last
        if self._sender is None:
            # Reason for a bare task: a notification belongs to no caller and must not delay one. `close` awaits it.
            self._sender = asyncio.create_task(self._send())

    @property
    def heard(self) -> bool:
        """Whether this process listens, so that it hears of jobs that other processes put back into a queue."""
        return bool(self._signals)

    def poll(self) -> None:
        """Note that a caller polls: notifications may have been lost, so the next claim scans from the start."""
        self.returns += 1

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[TopicSignal]:
        """Receive notifications of this process and the others inside the block."""
        signal = TopicSignal()
        self._signals.add(signal)
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(self._listen(signal))
            try:
                yield signal
            finally:
                self._signals.discard(signal)
                listener.cancel()

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender

    async def _send(self, after: float = 0.0) -> None:
        try:
            if after:
                await asyncio.sleep(after)
            while self._pending:
                topics, self._pending = sorted(self._pending), set()
                if not self._pending_returns:
                    topics.append(SORTS_LAST)
                self._pending_returns = 0
                with contextlib.suppress(StoreError):
                    await self._database.announce(topics)
                await asyncio.sleep(DEBOUNCE_SECONDS)
        finally:
            self._sender = None

    async def _listen(self, signal: TopicSignal) -> None:
        async with self._database.hear() as announcements:
            async for topics in announcements:
                self.returns += SORTS_LAST not in topics
                signal.set(topic for topic in topics if topic != SORTS_LAST)
