"""Connections within limits: how many, and how long one may take to say what it wants.

uvicorn bounds neither, so clients that open connections and never finish a request would use up all descriptors. Here
a request's head must arrive in time, and when the server is full, the connection goes that has waited longest without
a request: one whose client is about to send is young. A connection with a request in progress is never closed.
"""

import asyncio
import logging
import resource
import time
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.config import Settings

log = logging.getLogger(__name__)

SPARE = 128
"""Descriptors, at least, that stay for everything else: databases, files, connections that are being accepted."""
ACCEPT_AT_ONCE = 16
"""Connections that asyncio accepts in one turn of its loop. The limit is looked at a turn or two later, and what is
closed frees its descriptor another turn later: several times as many have a descriptor beyond the limit."""
REPEATS = 10
REPEAT_SECONDS = 60.0


def connection_limit(settings: Settings) -> int:
    """How many connections to hold: the setting, or what the process's descriptors allow, if that is less."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return settings.max_connections
    return max(8, min(settings.max_connections, descriptors - max(SPARE, descriptors // 4)))


class ConnectionLimits:
    """What the connections of one server share."""

    def __init__(self, settings: Settings) -> None:
        self.most = connection_limit(settings)
        self.header_timeout = settings.header_timeout
        self.waiting: OrderedDict[LimitedProtocol, None] = OrderedDict()
        """Connections without a request in progress, the longest wait first."""

    def protocol(self, *arguments: Any, **named: Any) -> "LimitedProtocol":
        return LimitedProtocol(self, *arguments, **named)


class LimitedProtocol(H11Protocol):
    """One connection. It waits from the end of one request to the end of the next one's head."""

    def __init__(self, limits: ConnectionLimits, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.most:
            self._make_room()
        self._wait()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_request:
            self._stop_waiting()
        elif not self.transport.is_closing():
            self._expect_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_request:  # The client had sent the next one already.
            self._stop_waiting()
        elif not self.transport.is_closing():
            self._wait()

    @property
    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._limits.waiting[self] = None

    def _stop_waiting(self) -> None:
        self._limits.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.header_timeout, self._late)

    def _late(self) -> None:
        self._deadline = None
        if not self._in_request:
            self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that has waited longest; if all are in use, this one."""
        log.warning("%d connections, as many as may be: closing those that wait", self._limits.most)
        oldest, _ = self._limits.waiting.popitem(last=False) if self._limits.waiting else (self, None)
        oldest.transport.abort()


class FewRepeats(logging.Filter):
    """Lets a message through a few times a minute: what strangers can cause must not fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        since, count = self._seen.get(record.msg, (now, 0))
        if now - since > REPEAT_SECONDS:
            since, count = now, 0
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[record.msg] = (since, count + 1)
        if count == REPEATS - 1:
            record.msg = f"{record.msg} (more of these are left out for up to a minute)"
        return count < REPEATS
