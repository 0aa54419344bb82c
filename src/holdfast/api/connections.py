"""Limits on connections: how many, and how long the head of a request may take.

uvicorn bounds neither, so clients that open connections and never finish a request would use up all descriptors. Here
a request's head must arrive in time. When the server is full, it closes the connection that has waited longest without
a request, since a client that is about to send one has only just connected. It never closes a connection with a request
in progress.

A new connection costs little until its first head is complete: `FirstRequestProtocol` collects the bytes, and only then
makes uvicorn's protocol with its parser. Thousands of clients that send a byte now and then leave time for the others.
"""

import asyncio
import logging
import re
import resource
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.config import Settings

log = logging.getLogger(__name__)

SPARE = 128
"""Descriptors reserved for everything else, at least: databases, files, connections that are being accepted."""
ACCEPT_AT_ONCE = 16
"""Connections that asyncio accepts in one iteration of its loop. The limit is checked an iteration or two later, and a
closed connection frees its descriptor one later still: several times this many can be open beyond the limit."""
END_OF_HEAD = re.compile(rb"\n\r?\n")
MOST_HEAD = 16 * 1024
"""Bytes of a head that are buffered; a longer one goes to the parser, which refuses it."""
REPEATS = 10
REPEAT_SECONDS = 60.0
FULL_SECONDS = 10.0


def connection_limit(settings: Settings) -> int:
    """Return the maximum number of connections: the setting, or what the process's descriptors allow, if less."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return settings.max_connections
    return max(8, min(settings.max_connections, descriptors - max(SPARE, descriptors // 4)))


class ConnectionLimits:
    """State that all connections of one server share."""

    def __init__(self, settings: Settings) -> None:
        self.most = connection_limit(settings)
        self.header_timeout = settings.header_timeout
        self.waiting: OrderedDict[FirstRequestProtocol | LimitedProtocol, None] = OrderedDict()
        """Connections without a request in progress, the longest wait first."""
        self._tell_after = 0.0

    def tell_full(self) -> None:
        """Log at intervals that connections are being closed: an attack causes that hundreds of times a second."""
        now = time.monotonic()
        if now >= self._tell_after:
            self._tell_after = now + FULL_SECONDS
            log.warning("connection limit of %d reached: closing connections without a request", self.most)

    def make_room(self) -> bool:
        """Close the connection that has waited longest; False if every one has a request in progress."""
        self.tell_full()
        if not self.waiting:
            return False
        oldest, _ = self.waiting.popitem(last=False)
        oldest.transport.abort()
        return True

    def protocol(self, **named: Any) -> "FirstRequestProtocol":
        """Make the protocol of a new connection; the arguments are those of uvicorn's protocols."""
        return FirstRequestProtocol(self, named)


class FirstRequestProtocol(asyncio.Protocol):
    """A connection that has not sent the head of its first request yet; a LimitedProtocol takes over then."""

    transport: asyncio.Transport

    def __init__(self, limits: ConnectionLimits, named: Mapping[str, Any]) -> None:
        self._limits = limits
        self._named = named
        self._connections: set[Any] = named["server_state"].connections
        self._head = b""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        if len(self._connections) >= self._limits.most and not self._limits.make_room():
            transport.abort()
            return
        self._connections.add(self)
        self._limits.waiting[self] = None
        loop = self._named.get("_loop") or asyncio.get_running_loop()
        self._deadline = loop.call_later(self._limits.header_timeout, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()

    def data_received(self, data: bytes) -> None:
        searched = max(0, len(self._head) - 2)
        self._head += data
        if END_OF_HEAD.search(self._head, searched) or len(self._head) > MOST_HEAD or self._head[0] < 0x21:
            self._hand_over()

    def shutdown(self) -> None:
        """The server stops."""
        self.transport.close()

    def _hand_over(self) -> None:
        self._forget()
        protocol = LimitedProtocol(self._limits, **self._named)
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(self._head)

    def _forget(self) -> None:
        self._connections.discard(self)
        self._limits.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()


class LimitedProtocol(H11Protocol):
    """A connection after its first head. It counts as waiting from the end of one request to the next complete head."""

    def __init__(self, limits: ConnectionLimits, **named: Any) -> None:
        super().__init__(**named)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
        if self._in_request:  # The client had already sent the next request.
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


class RepeatFilter(logging.Filter):
    """Passes a message a few times a minute: log lines that strangers can cause must not fill the disk."""

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
            record.msg = f"{record.msg} (repeats are suppressed for up to a minute)"
        return count < REPEATS
