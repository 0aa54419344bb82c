"""One connection of an event stream, read by its own task, so that it can be closed at any time.

httpx reads a body through a chain of async generators. One that is left in the middle of its iteration is closed by the
garbage collector, a task for each link of the chain: at the end of a program these are destroyed before they have run,
and asyncio complains. A task that is cancelled while it reads ends the whole chain at once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

import httpx

from holdfast import decoding
from holdfast.model import Event

MOST_WAITING = 100
"""Events that are read ahead of the caller; after that the server waits, as for any slow client."""


class StreamBroken(httpx.RemoteProtocolError):
    """The stream ended before the job did."""


class _End:
    """The job has ended."""


class EventStream:
    """The events of one connection, in order. A context manager; `next` returns None at the end of the job."""

    def __init__(
        self,
        response: AbstractAsyncContextManager[httpx.Response],
        accept: Callable[[httpx.Response], Awaitable[None]],
    ) -> None:
        self._response = response
        self._accept = accept
        self._read: asyncio.Queue[Event | _End | Exception] = asyncio.Queue()
        self._room = asyncio.Event()
        self.accepted = False

    async def __aenter__(self) -> Self:
        # A bare task: a task group would live in the caller's generator, which may be closed by another task.
        self._reader = asyncio.create_task(self._read_all())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def next(self) -> Event | None:
        found = await self._read.get()
        self._room.set()
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, Event) else None

    async def _read_all(self) -> None:
        """Read to the end; pass errors to the caller of `next`."""
        try:
            async with self._response as response:
                await self._accept(response)
                self.accepted = True
                await self._read_lines(response)
            broken: Exception = StreamBroken("the stream ended before the job")
        except Exception as error:
            broken = error
        except asyncio.CancelledError:
            self._read.put_nowait(StreamBroken("the stream was closed"))
            raise
        self._read.put_nowait(broken)

    async def _read_lines(self, response: httpx.Response) -> None:
        ended = leaving = False
        async for line in response.aiter_lines():
            if leaving:
                continue  # The cancellation arrives at the next line that has to be awaited.
            if line == "event: end":
                ended = True
            elif line.startswith("data: "):
                self._read.put_nowait(_End() if ended else decoding.decode(line[6:], Event))
            leaving = not await self._has_room()

    async def _has_room(self) -> bool:
        """Wait for room. If cancelled meanwhile, return False and let the cancellation arrive inside the chain."""
        try:
            while self._read.qsize() >= MOST_WAITING:
                self._room.clear()
                await self._room.wait()
        except asyncio.CancelledError:
            if (reader := asyncio.current_task()) is not None:
                reader.cancel()
            return False
        return True
