"""The output of one container: frames from the engine's log, and from the supervisor's own log where there are gaps.

The engine's log may rotate, or break off while the engine is restarted. At the end of the attempt the total is compared
with the exit record.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.runner.attempt_folder import ExitRecord
from holdfast.runner.base import EngineUnreachable
from holdfast.runner.docker.archive import only_file
from holdfast.runner.docker.container_config import ATTEMPT
from holdfast.runner.docker.engine import EngineError, NoSuchObject, to_seconds
from holdfast.runner.frames import HEADER, Frame, NotAFrame, Stream, fresh, from_copy, parse_frame
from holdfast.timing import backoff, jitter

if TYPE_CHECKING:
    from holdfast.runner.docker.runner import DockerRunner

BUFFER = 4 << 20
"""Bytes of output buffered here; beyond that we stop reading and the engine keeps them."""
LAST_SECONDS = 10.0
"""How long the engine may take to return the rest of the log of an ended container."""
STALL_SECONDS = 15.0
"""After this silence the log is requested again: following a log stalls at a rotation."""
MOST_STALLS = 8
"""How many times longer the silence may become, while each request finds nothing new."""


class ContainerLog:
    """Reads the log of one container. `ended` is set when the container no longer runs."""

    def __init__(
        self,
        runner: "DockerRunner",
        container_id: str,
        *,
        stdout: int,
        stderr: int,
        ended: asyncio.Event,
        exists: Callable[[], bool],
        read_exit: Callable[[], Awaitable[ExitRecord | None]],
        on_event: Callable[[dict[str, Any]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._engine = runner.engine
        self._id = container_id
        self._ended = ended
        self._exists = exists
        self._read_exit = read_exit
        self._on_event = on_event
        self._on_end = on_end
        self._offsets = {Stream.STDOUT: stdout, Stream.STDERR: stderr, Stream.EVENTS: 0}
        self._waiting: deque[Frame] = deque()
        self._size = 0
        self._room = asyncio.Event()
        self._at = ""
        self._log_ended = asyncio.Event()
        self._arrived = asyncio.Event()
        """Set when a frame arrives, and when the log ends."""
        self._patience = STALL_SECONDS
        self.output_seen = asyncio.Event()
        """Set once the supervisor has written something."""
        self._volume: AsyncIterator[Frame] | None = None
        self._whole = False

    async def read(self) -> None:
        """Read the engine's log to its end, reconnecting when it breaks off."""
        n = 0
        while True:
            n += 1
            try:
                if await self._follow():
                    n = 0
                    continue
                if await self._container_ends():
                    break
                self._on_end()
            except EngineUnreachable:
                self._runner.note_failure()
            except EngineError as error:
                if self._ended.is_set() or isinstance(error, NoSuchObject):
                    break  # The volume has the rest.
            await asyncio.sleep(jitter(backoff(n, base=0.05, cap=2.0)))
        self._log_ended.set()
        self._arrived.set()

    async def finished(self) -> None:
        """Wait until the log of an ended container is read to its end, or the engine takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                await self._log_ended.wait()

    async def _follow(self) -> bool:
        """Read on from the last line that we know. Return whether the log stalled instead of ending.

        A container that stays silent is asked for its log less and less often.
        """
        last = self._at
        async with contextlib.aclosing(self._engine.log(self._id, since=to_since(self._at))) as lines:
            while True:
                try:
                    async with asyncio.timeout(self._patience):
                        self._at, line = await anext(lines)
                except StopAsyncIteration:
                    return False
                except TimeoutError:
                    self._patience = min(2 * self._patience, MOST_STALLS * STALL_SECONDS)
                    return True
                if self._at != last:
                    self._patience = STALL_SECONDS
                with contextlib.suppress(NotAFrame):
                    await self._take(from_copy(line))

    async def _container_ends(self) -> bool:
        """Return whether the container ends now: a log also ends when the engine is restarted."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._ended.wait()
        return self._ended.is_set()

    async def _take(self, frame: Frame) -> None:
        if frame.end <= self._offsets[frame.stream]:
            return
        self.output_seen.set()
        if frame.stream is Stream.EVENTS:
            self._on_event(frame.event)
        while self._size > BUFFER:
            self._room.clear()
            await self._room.wait()
        self._waiting.append(frame)
        self._size += len(frame.data)
        self._arrived.set()

    async def frames(self, most: int) -> Sequence[Frame]:
        """Return new frames. While the engine is unreachable: none, or after the attempt's end, raise."""
        try:
            taken = await self._next(most)
            while not taken and self._ended.is_set() and not self._whole:
                last = await self._await_last()
                taken = await self._next(most)
                if last and not taken:
                    taken = await self._check_whole(most)
            return taken
        except EngineUnreachable:
            self._runner.note_failure()
            if self._ended.is_set():
                raise
            return ()

    async def _next(self, most: int) -> list[Frame]:
        """Return unread frames: from the volume while a gap is filled, else from the engine's log."""
        taken: list[Frame] = []
        while most > 0:
            try:
                frame = await self._next_one()
            except EngineUnreachable:
                if taken:  # These count as read already.
                    break
                raise
            if frame is None:
                break
            if (new := fresh(frame, self._offsets)) is not None:
                taken.append(new)
                most -= len(new.data) + HEADER.size
        return taken

    async def _next_one(self) -> Frame | None:
        if self._volume is not None:
            try:
                return await anext(self._volume)
            except StopAsyncIteration:
                self._volume = None
            except EngineUnreachable:
                self._volume = None
                self._whole = False
                raise
            return self._pop()
        if self._waiting and self._waiting[0].offset > self._offsets[self._waiting[0].stream]:
            self._volume = self._in_volume()
            return await self._next_one()
        return self._pop()

    def _pop(self) -> Frame | None:
        if not self._waiting:
            return None
        frame = self._waiting.popleft()
        self._size -= len(frame.data)
        self._room.set()
        return frame

    async def _in_volume(self) -> AsyncIterator[Frame]:
        """Yield the frames of the supervisor's own log written so far."""
        if not self._exists():
            return
        buffer = b""
        with contextlib.suppress(NoSuchObject, NotAFrame):
            async with contextlib.aclosing(self._engine.get(self._id, f"{ATTEMPT}/log")) as tar:
                async for chunk in only_file(tar):
                    buffer += chunk
                    start = 0
                    while frame := parse_frame(buffer, start):
                        start += HEADER.size + len(frame.data)
                        yield frame
                    buffer = buffer[start:]

    async def _await_last(self) -> bool:
        """Wait for more of the log. Return True if it has ended, or the engine takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                while not self._waiting:
                    if self._log_ended.is_set():
                        return True
                    self._arrived.clear()
                    await self._arrived.wait()
                return False
        return True

    async def _check_whole(self, most: int) -> list[Frame]:
        """At the end, compare with the exit record, and read the supervisor's log if output is missing."""
        ended = await self._read_exit()
        self._whole = True
        if ended is not None and self._has_all(ended):
            return []
        self._volume = self._in_volume()
        return await self._next(most)

    def _has_all(self, ended: ExitRecord) -> bool:
        return (
            self._log_ended.is_set()
            and ended.copy_lost == 0
            and self._offsets[Stream.STDOUT] >= ended.stdout_length - ended.stdout_dropped
            and self._offsets[Stream.STDERR] >= ended.stderr_length - ended.stderr_dropped
        )


def to_since(at: str) -> str:
    """Convert a time of the engine's log to the format of its `since`: seconds and nanoseconds."""
    whole, _, rest = at.removesuffix("Z").partition(".")
    try:
        return f"{to_seconds(whole + 'Z'):.0f}.{rest.ljust(9, '0')}"
    except ValueError:
        return ""
