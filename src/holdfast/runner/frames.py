"""Reads the supervisor's log: complete frames of stdout, stderr and events, from any offset."""

import binascii
import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from holdfast.timing import from_micros

MAGIC = b"HFF1"
HEADER = struct.Struct("<4sBBHIIQQ")
MOST = 1 << 20
BLOCK = 1 << 18
"""Bytes read at once: several of the largest frames."""


class Stream(IntEnum):
    STDOUT = 1
    STDERR = 2
    EVENTS = 3


STREAMS = tuple(Stream)


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Some bytes of one stream. `offset` counts every byte that the child wrote, including those that were not kept."""

    stream: Stream
    task: int
    offset: int
    at: datetime
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)

    @property
    def event(self) -> dict[str, Any]:
        """The content of an event frame."""
        event: dict[str, Any] = msgspec.json.decode(self.data.decode("utf-8", "replace"))
        return event


class NotAFrame(ValueError):
    """These bytes are not a frame: an incomplete write, or not a log."""


def parse_frame(block: bytes, start: int = 0) -> Frame | None:
    """Return the frame that starts here, or None if it is incomplete."""
    header = block[start : start + HEADER.size]
    if len(header) < HEADER.size:
        return None
    magic, stream, _, task, length, check, offset, at = HEADER.unpack(header)
    if magic != MAGIC or zlib.crc32(header[16:], zlib.crc32(header[:12])) != check or not 1 <= stream <= len(STREAMS):
        raise NotAFrame(header[:4])
    data = block[start + HEADER.size : start + HEADER.size + length]
    if len(data) < length:
        return None
    return Frame(stream=STREAMS[stream - 1], task=task, offset=offset, at=from_micros(at), data=data)


def whole_frames(block: bytes) -> Iterator[Frame]:
    """Yield frames up to the first that is incomplete or invalid."""
    start = 0
    with contextlib.suppress(NotAFrame):
        while frame := parse_frame(block, start):
            yield frame
            start += HEADER.size + len(frame.data)


def from_copy(line: bytes) -> Frame:
    """Return the frame in a line that a supervisor with --copy wrote to its stdout."""
    try:
        whole = binascii.a2b_base64(line.strip(), strict_mode=True)
    except binascii.Error as error:
        raise NotAFrame(line[:40]) from error
    frame = parse_frame(whole)
    if frame is None or len(whole) != HEADER.size + len(frame.data):
        raise NotAFrame(line[:40])
    return frame


class FrameReader:
    """Reads a log that may still grow, from given offsets of its streams, each byte once.

    `torn` is true if the remaining bytes are not a frame: a write in progress, or one that was interrupted.
    """

    def __init__(self, path: Path, *, stdout: int = 0, stderr: int = 0, events: int = 0) -> None:
        self.path = path
        self.offsets = {Stream.STDOUT: stdout, Stream.STDERR: stderr, Stream.EVENTS: events}
        self.position = 0
        self.torn = False

    def read(self, most: int = MOST) -> list[Frame]:
        """Return the next complete frames, about `most` bytes in total; none if there is nothing new."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        try:
            return self._read(lambda: os.pread(fd, BLOCK, self.position), most)
        finally:
            os.close(fd)

    def read_from(self, log: bytes, most: int = MOST) -> list[Frame]:
        """Like `read`, from the bytes of the whole log."""
        return self._read(lambda: log[self.position : self.position + BLOCK], most)

    def _read(self, next_block: Callable[[], bytes], most: int) -> list[Frame]:
        frames: list[Frame] = []
        while most > 0:
            block = next_block()
            whole = list(whole_frames(block))
            self.torn = bool(block) and not whole
            if not whole:
                break
            for frame in whole:
                self.position += HEADER.size + len(frame.data)
                if (new := fresh(frame, self.offsets)) is not None:
                    frames.append(new)
                    most -= len(new.data)
                if most <= 0:
                    break
        return frames


def fresh(frame: Frame, offsets: dict[Stream, int]) -> Frame | None:
    """Return the part of a frame that was not read before, and advance the offset."""
    known = offsets[frame.stream]
    if frame.end <= known:
        return None
    offsets[frame.stream] = frame.end
    if frame.offset >= known:
        return frame
    return msgspec.structs.replace(frame, offset=known, data=frame.data[known - frame.offset :])
