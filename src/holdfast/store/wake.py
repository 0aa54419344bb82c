"""Wake-ups: a hint that something may have changed, never the truth itself.

Inside a process they arrive at once. To others the first goes out at once too, and what follows within a few
milliseconds goes together in one message.
Whoever misses one finds the work by polling.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from holdfast.errors import StoreError
from holdfast.store.database import Database

DEBOUNCE_SECONDS = 0.003

STOP = "stop"
ORPHAN = "orphan"


def work(queue: str) -> str:
    """The topic of a queue that has something to claim."""
    return f"work:{queue}"


class Signal:
    """Collects topics until somebody waits for them."""

    def __init__(self) -> None:
        self._topics: set[str] = set()
        self._event = asyncio.Event()

    def set(self, topics: Iterable[str]) -> None:
        self._topics.update(topics)
        self._event.set()

    async def wait(self, timeout: float) -> frozenset[str]:
        """Return the topics heard since the last call, or none when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._event.wait()
        self._event.clear()
        topics, self._topics = frozenset(self._topics), set()
        return topics


class Wake:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._signals: set[Signal] = set()
        self._pending: set[str] = set()
        self._sender: asyncio.Task[None] | None = None
        self.returns = 0
        """How often something may have come back to its old place in a line."""

    def post(self, topics: Iterable[str], *, behind: bool = False) -> None:
        """Tell this process at once, and the others in a moment.

        `behind` says that it is only new work, which stands behind the old in its line.
        """
        topics = set(topics)
        if not topics:
            return
        if not behind:
            self.returns += 1
        for signal in self._signals:
            signal.set(topics)
        self._pending |= topics
        if self._sender is None:
            # Reason for a bare task: a wake-up belongs to no caller, and must not delay one. `close` awaits it.
            self._sender = asyncio.create_task(self._send())

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Signal]:
        """Hear this process and the others while the block lasts."""
        signal = Signal()
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

    async def _send(self) -> None:
        try:
            while self._pending:
                topics, self._pending = sorted(self._pending), set()
                with contextlib.suppress(StoreError):
                    await self._database.announce(topics)
                await asyncio.sleep(DEBOUNCE_SECONDS)
        finally:
            self._sender = None

    async def _listen(self, signal: Signal) -> None:
        async with self._database.hear() as announcements:
            async for topics in announcements:
                signal.set(topics)
