"""One log line when the database is lost, with the cause, and one when it is back: more would only repeat them.

Everything that uses the database fails while it is unreachable, and retries. Such code logs at `level_of(error)`,
which keeps an error that was reported here out of the usual log.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import urlsplit

from holdfast.errors import StoreUnreachable
from holdfast.timing import backoff, jitter

log = logging.getLogger(__name__)
T = TypeVar("T")
SETTLE_SECONDS = 1.0
"""A server that shuts down answers on some connections for a moment after it has cut others: it is not back yet."""
STARTS = 5
"""How often a starting process tries before it gives up: about two seconds."""


class DatabaseOutage:
    """Whether a database is unreachable. All stores of a process share one, also the heartbeat's in its own thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._since: float | None = None

    @property
    def away(self) -> bool:
        return self._since is not None

    def lost(self, error: StoreUnreachable) -> None:
        """Record that an operation could not reach the database."""
        error.reported = True
        with self._lock:
            if self._since is not None:
                return
            self._since = time.monotonic()
        log.warning("database %s lost, retrying until it is back: %s", self._name, error.message)

    def back(self, began: float) -> None:
        """Record the success of an operation that began at this time of the monotonic clock."""
        if self._since is None:
            return
        with self._lock:
            if self._since is None or began < self._since + SETTLE_SECONDS:
                return
            seconds, self._since = time.monotonic() - self._since, None
        log.warning("database %s back after %.1f s", self._name, seconds)


_known: dict[str, DatabaseOutage] = {}


def outage_of(url: str) -> DatabaseOutage:
    """Return the one `DatabaseOutage` of a database in this process."""
    parts = urlsplit(url)
    name = f"{parts.hostname or 'local'}{f':{parts.port}' if parts.port else ''}{parts.path}"
    return _known.setdefault(name, DatabaseOutage(name))


def level_of(error: BaseException) -> int:
    """Return the log level for an error that will be retried."""
    return logging.DEBUG if isinstance(error, StoreUnreachable) and error.reported else logging.WARNING


async def retry_while_starting(ask: Callable[[], Awaitable[T]]) -> T:
    """Call `ask` while a process starts, and retry it after a lost connection. `ask` must be idempotent."""
    for n in range(1, STARTS):
        try:
            return await ask()
        except StoreUnreachable:
            await asyncio.sleep(jitter(backoff(n, base=0.2, cap=1.0)))
    return await ask()


class QuietPool(logging.Filter):
    """Drops asyncpg's traceback for each connection that its pool cannot open: the outage has been reported."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "restore the pool connection floor" not in str(record.msg)


QUIET = QuietPool()
