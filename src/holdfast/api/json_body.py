"""JSON bodies: read, decoded and checked within limits of size, depth, number of values, and memory.

Decoding can use thirty times the memory of the body (`{},{},…`), so the values are counted first, which allocates
nothing. A large body is decoded and checked in a thread, and only a few large ones are in memory at once; other large
requests are not read until then.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from holdfast import decoding
from holdfast.api.auth import says_json
from holdfast.config import Settings
from holdfast.errors import AtCapacity, BadRequest, HoldfastError, Invalid, TooLarge
from holdfast.runner_specs import invalid_field

LARGE = 64 * 1024
"""Bytes from which a body is decoded in a thread: for smaller ones the switch costs more."""
LARGE_AT_ONCE = 3
SLOT_SECONDS = 10.0
MOST_VALUES = 250_000
"""Ten thousand jobs of 25 values. Decoding them holds the GIL for some 50 ms."""
PIECE = 64 * 1024
"""Bytes that are scanned in one step while values are counted; other threads run in between."""
SEPARATORS = (b",", b"[", b"{")
OPEN = b"[{"
T = TypeVar("T")


class LargeBodies:
    """A semaphore for large bodies, so that many at once use no more memory than a few."""

    def __init__(self, most: int = LARGE_AT_ONCE, wait: float = SLOT_SECONDS) -> None:
        self._slots = asyncio.Semaphore(most)
        self._wait = wait

    @asynccontextmanager
    async def admitted(self, size: int) -> AsyncIterator[None]:
        """Admit a body of this size for the duration of the block; small ones are always admitted."""
        if size <= LARGE:
            yield
            return
        try:
            async with asyncio.timeout(self._wait):
                await self._slots.acquire()
        except TimeoutError:
            raise AtCapacity("other large requests are being read; try again, or send smaller ones") from None
        try:
            yield
        finally:
            self._slots.release()


def declared_size(request: Request, limit: int) -> int:
    """Return the declared size of a body; one of unknown length counts as the limit."""
    if "transfer-encoding" in request.headers:
        return limit
    content_length = request.headers.get("content-length", "0")
    if not (content_length.isascii() and content_length.isdigit()):
        return 0
    if len(content_length) > 18 or int(content_length) > limit:
        raise TooLarge("body", f"{content_length[:18]} bytes; at most {limit} are accepted")
    return int(content_length)


async def read_body(request: Request, kind: Any, settings: Settings) -> Any:
    """Read JSON within the limits; without a body, return the struct's defaults."""
    raw = await _read(request, settings.max_body_bytes)
    if not raw and kind is not dict and not any(f.required for f in msgspec.structs.fields(kind)):
        return kind()
    if raw and not says_json(request.headers):
        raise BadRequest("the body must be JSON, with Content-Type: application/json")
    return await in_thread_if_large(len(raw), lambda: _checked(raw, kind, settings.max_json_depth))


async def in_thread_if_large(size: int, work: Callable[[], T]) -> T:
    """Run work on `size` bytes: here if they are few, else in a thread, so that other requests continue."""
    return work() if size <= LARGE else await asyncio.to_thread(work)


async def _read(request: Request, limit: int) -> bytearray:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise TooLarge("body", f"over {limit} bytes")
    return body


def _checked(raw: bytearray, kind: Any, depth: int) -> Any:
    data = decode(raw, depth)
    if kind is dict:
        if not isinstance(data, dict):
            raise Invalid("body", "must be a JSON object")
        return data
    try:
        return decoding.convert(data, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def decode(raw: bytes | bytearray, depth: int) -> Any:
    """Decode JSON; refuse too many values or too deep nesting."""
    if len(raw) > MOST_VALUES and count_values(raw) > MOST_VALUES:
        raise TooLarge("body", f"has more than {MOST_VALUES} values; send it in parts")
    try:
        with _no_collection():
            data = msgspec.json.decode(raw)
    except RecursionError:
        raise _too_deep(depth) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    # Only a body with many brackets can be deep; visiting each value of a bulk costs more than decoding it.
    if sum(raw.count(bracket) for bracket in OPEN) > depth and _deeper_than(data, depth):
        raise _too_deep(depth)
    return data


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector, which would traverse the new objects several times while holding the GIL."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def count_values(raw: bytes | bytearray) -> int:
    """Return an upper bound of the values in a JSON text: its commas and opening brackets outside of strings."""
    total, inside, escape = 0, 0, b""
    for start in range(0, len(raw), PIECE):
        piece = escape + bytes(raw[start : start + PIECE])
        piece = piece.replace(b"\\\\", b"")
        escape = b"\\" if piece.endswith(b"\\") else b""  # The character that it escapes is in the next piece.
        parts = piece[: len(piece) - len(escape)].replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        total += sum(outside.count(separator) for separator in SEPARATORS)
        inside ^= (len(parts) - 1) & 1
    return total + 1


def _too_deep(depth: int) -> HoldfastError:
    return Invalid("body", f"is nested deeper than {depth} levels")


def _deeper_than(data: Any, depth: int) -> bool:
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
