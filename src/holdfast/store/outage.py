"""One line in the log when the database is lost, with the cause, and one when it is back: all else would repeat them.

Everything that works with the database fails while it is away, and tries again. What such code logs goes through
`level_of`, which keeps an error that was reported here out of the usual log.
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
STARTS = 5
"""How often a process asks at its start before it gives up: about two seconds."""


class Outage:
    """Whether a database is away for this process. Its stores share one: the heartbeat's is used in another thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._since: float | None = None

    @property
    def away(self) -> bool:
        return self._since is not None

    def lost(self, error: StoreUnreachable) -> None:
        """An operation found the database away."""
        error.reported = True
        with self._lock:
            if self._since is not None:
                return
            self._since = time.monotonic()
        log.warning("database %s lost, retrying until it is back: %s", self._name, error.message)

    def back(self) -> None:
        """An operation was answered."""
        with self._lock:
            if self._since is None:
                return
            seconds, self._since = time.monotonic() - self._since, None
        log.warning("database %s back after %.1f s", self._name, seconds)


_known: dict[str, Outage] = {}


def outage_of(url: str) -> Outage:
    """The one record of a database in this process."""
    parts = urlsplit(url)
    name = f"{parts.hostname or 'local'}{f':{parts.port}' if parts.port else ''}{parts.path}"
    return _known.setdefault(name, Outage(name))


def level_of(error: BaseException) -> int:
    """How loud to be about an error that will be tried again."""
    return logging.DEBUG if isinstance(error, StoreUnreachable) and error.reported else logging.WARNING


async def asked_again(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask the database while a process starts, and again where a connection was cut. It must be safe to ask twice."""
    for n in range(1, STARTS):
        try:
            return await ask()
        except StoreUnreachable:
            await asyncio.sleep(jitter(backoff(n, base=0.2, cap=1.0)))
    return await ask()


class QuietPool(logging.Filter):
    """Drops asyncpg's traceback for each connection that its pool cannot make: the outage has been reported."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "restore the pool connection floor" not in str(record.msg)


QUIET = QuietPool()
