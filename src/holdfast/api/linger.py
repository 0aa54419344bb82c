"""Refuse bodies that arrive too slowly, and deliver responses although the body was not read to its end.

If a server answers and closes while the client still sends, the kernel resets the connection, and most clients report
the reset instead of the answer. So the whole answer is sent first, and the rest of the body is read and discarded, up
to a number of bytes and seconds; only then does the response end and the connection close.

A body must arrive at a minimum rate, after some seconds of grace. Only time in which the service waits for it counts.
"""

import asyncio
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import RequestTimeout

MOST_BYTES = 256 * 1024 * 1024
MOST_SECONDS = 30.0
QUIET_SECONDS = 5.0
"""How long a client may send nothing before the service stops waiting for it."""
SMALL = 64 * 1024
"""A body up to this size is read to its end, so that the connection can be used again."""

GRACE_SECONDS = 20.0
LEAST_RATE = 16 * 1024
"""Bytes per second that a body must have on average, after the grace."""


class Linger:
    """ASGI middleware: read the rest of a refused body between the answer and the end of the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _has_body(Headers(scope=scope)):
            exchange = _Exchange(Headers(scope=scope), receive, send)
            await self._app(scope, exchange.receive, exchange.send)
        else:
            await self._app(scope, receive, send)


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


class _Exchange:
    """One request and its response."""

    def __init__(self, headers: Headers, receive: Receive, send: Send) -> None:
        length = headers.get("content-length", "")
        self._small = length.isdigit() and len(length) < 10 and int(length) <= SMALL
        self._receive = receive
        self._send = send
        self._ended = False
        """The client has sent everything or disconnected, or the service no longer waits for it."""
        self._received = 0
        self._waited = 0.0
        self._given_up = False

    async def receive(self) -> Message:
        if self._ended:
            return await self._receive()
        began = time.monotonic()
        try:
            async with asyncio.timeout(GRACE_SECONDS + self._received / LEAST_RATE - self._waited):
                message = await self._next()
        except TimeoutError:
            self._given_up = True
            raise RequestTimeout(
                f"the body arrived too slowly: {self._received} bytes in {self._waited + time.monotonic() - began:.0f} "
                f"seconds; at least {LEAST_RATE} per second are expected"
            ) from None
        self._waited += time.monotonic() - began
        return message

    async def _next(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._ended = True
        return message

    async def send(self, message: Message) -> None:
        if self._ended:
            await self._send(message)
        elif message["type"] == "http.response.start":
            if not self._small:
                MutableHeaders(scope=message)["Connection"] = "close"
            await self._send(message)
        elif message.get("more_body", False):
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            if not self._given_up:
                await self._discard()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self) -> None:
        left = MOST_BYTES
        try:
            async with asyncio.timeout(MOST_SECONDS):
                while left > 0 and not self._ended:
                    async with asyncio.timeout(QUIET_SECONDS):
                        left -= len((await self._next()).get("body", b""))
        except TimeoutError:
            pass
