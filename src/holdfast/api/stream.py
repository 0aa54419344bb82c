"""Streams of a job's history: what one client receives, and the response that carries it.

A follower has one piece in memory at a time: a slow client costs no more than that piece and continues from its
cursor; a client that reads nothing is disconnected after a while. A stream ends when the job is terminal and the
cursor is at its last seq.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.api.fanout import BLOCK, PIECE_BYTES, Fanout, Follower, Form
from holdfast.errors import AtCapacity, HoldfastError, NotFound, StoreError, TooManyStreams
from holdfast.store.events import Head
from holdfast.store.outage import level_of

TOKEN_SECONDS = 5.0
"""How often an open stream checks whether its token is still valid."""

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
NOT_BUFFERED = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
MEDIA: dict[Form, str] = {"sse": "text/event-stream", "ndjson": "application/x-ndjson"}


async def encoded_events(follower: Follower, form: Form, *, follow: bool = True) -> AsyncGenerator[bytes, None]:
    """Yield everything for a client: the events after its cursor, then new ones, then the end."""
    feed = follower.feed
    upto = None if follow or feed.head is None else feed.head.seq
    quiet_since = time.monotonic()
    while not follower.gone:
        follower.woken.clear()
        head = feed.head
        piece = b""
        if head is not None and follower.cursor < head.seq:
            piece, follower.cursor = await _next(follower, form)
        if piece:
            yield piece
            quiet_since = time.monotonic()
        elif upto is not None and follower.cursor >= upto:
            return
        elif head is None or (head.status.terminal and follower.cursor == head.seq):
            if form == "sse":
                yield _end(head)
            return
        elif not await _woken(follower, quiet_since + KEEP_ALIVE_SECONDS - time.monotonic()):
            quiet_since = time.monotonic()
            if form == "sse":
                yield b": keep-alive\n\n"


async def _next(follower: Follower, form: Form) -> tuple[bytes, int]:
    """Return the next piece, or an empty one while the database is unreachable."""
    try:
        block = await follower.feed.block(follower.cursor // BLOCK)
        return block.piece(form, follower.cursor)
    except NotFound:
        follower.feed.tell(None)
    except StoreError as error:
        log.log(level_of(error), "a stream waits for the database: %s", error)
        await asyncio.sleep(0.5)
        follower.woken.set()
    return b"", follower.cursor


async def _woken(follower: Follower, seconds: float) -> bool:
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await follower.woken.wait()
    except TimeoutError:
        return False
    return True


def _end(head: Head | None) -> bytes:
    data = {"status": "deleted" if head is None else head.status, "reason": head.reason if head else None}
    return b"event: end\ndata: %b\n\n" % msgspec.json.encode(data)


class OpenStreams:
    """How many streams each token has open on this server."""

    def __init__(self, per_token: int, most: int) -> None:
        self._per_token = per_token
        self._most = most
        self._open: Counter[str] = Counter()

    def refuse_more(self, name: str) -> None:
        if self._open[name] >= self._per_token:
            raise TooManyStreams(
                f"token {name} has {self._open[name]} streams open, as many as HOLDFAST_STREAMS_PER_TOKEN allows: "
                "close some, or share one"
            )
        if self._open.total() >= self._most:
            raise AtCapacity("the stream limit of this server is reached; try again later, or use another server")

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[None]:
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]


class EventStreamResponse(Response):
    """A response that ends with the history, with its client or with the client's token."""

    def __init__(
        self,
        fanout: Fanout,
        job_id: str,
        *,
        streams: OpenStreams,
        by: str,
        valid: Callable[[], Awaitable[bool]],
        tenant: str,
        after: int,
        form: Form,
        stall: float,
        follow: bool = True,
        name: str | None = None,
    ) -> None:
        self._stall = stall
        self._stalled = False
        self._streams = streams
        self._by = by
        self._valid = valid
        self._fanout = fanout
        self._job_id = job_id
        self._tenant = tenant
        self._after = after
        self._form = form
        self._follow = follow
        headers = dict(NOT_BUFFERED)
        if name is not None:
            headers["Content-Disposition"] = f'attachment; filename="{name}"'
        self.status_code = 200
        self.media_type = MEDIA[form]
        self.background = None
        self.body = b""
        self.init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def opened(self) -> "EventStreamResponse":
        """Refuse before the status is sent: too many streams, an unknown job, a cursor past the end."""
        self._streams.refuse_more(self._by)
        async with self._fanout.follow(self._job_id, tenant=self._tenant, after=self._after):
            return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._streams.one(self._by):
                async with self._fanout.follow(self._job_id, tenant=self._tenant, after=self._after) as follower:
                    await self._send(follower, receive, send)
        except HoldfastError as error:  # The job was deleted since the stream was opened.
            log.info("could not start a stream of job %s: %s", self._job_id, error)
            await send({"type": "http.response.start", "status": error.status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def _send(self, follower: Follower, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._form == "sse":
            await send({"type": "http.response.body", "body": b": holdfast\n\n", "more_body": True})
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_watch(receive, follower))
            guard = group.create_task(_end_with_token(self._valid, follower))
            async with contextlib.aclosing(encoded_events(follower, self._form, follow=self._follow)) as found:
                async for piece in found:
                    for start in range(0, len(piece), PIECE_BYTES):
                        part = piece[start : start + PIECE_BYTES]
                        await self._send_in_time(send, part, follower)
                        if follower.gone:
                            break
            watch.cancel()
            guard.cancel()
        if self._stalled or (follower.cut and self._form == "ndjson"):
            return  # No end event: without the last chunk, the client knows that there is more.
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_in_time(self, send: Send, part: bytes, follower: Follower) -> None:
        """Send a part; disconnect a client that reads nothing for too long. It can reconnect after its last event."""
        try:
            async with asyncio.timeout(self._stall):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except TimeoutError:
            log.info("a follower of job %s read nothing for %g seconds; disconnecting it", self._job_id, self._stall)
            self._fanout.cut += 1
            self._stalled = True
            follower.leave()


async def _end_with_token(valid: Callable[[], Awaitable[bool]], follower: Follower) -> None:
    """End a stream whose token was deleted or expired; when the client reconnects, it is refused."""
    while await valid():  # noqa: ASYNC110 - nobody signals that a token expired
        await asyncio.sleep(TOKEN_SECONDS)
    log.info("disconnecting a follower of job %s: its token is no longer valid", follower.feed.job_id)
    follower.cut = True
    follower.leave()


async def _watch(receive: Receive, follower: Follower) -> None:
    """Detect that the client has disconnected, even while there is nothing to send."""
    while (await receive())["type"] != "http.disconnect":
        pass
    follower.leave()
