"""The supervisor's log: frames of stdout, stderr and events, read whole and from any offset."""

import binascii
import os
import struct
import zlib
from datetime import datetime
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from holdfast.timing import from_micros

MAGIC = b"HFF1"
HEADER = struct.Struct("<4sBBHIIQQ")
MOST = 1 << 20


class Stream(IntEnum):
    STDOUT = 1
    STDERR = 2
    EVENTS = 3


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Some bytes of one stream. `offset` counts every byte that the child wrote, also those that were not kept."""

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
    """Bytes where a frame should be: torn, or not a log."""


def parse_header(data: bytes) -> tuple[Frame, int]:
    """Return a frame without its bytes, and their number."""
    magic, stream, _, task, length, check, offset, at = HEADER.unpack(data)
    if magic != MAGIC or zlib.crc32(data[:12] + data[16:]) != check or stream not in Stream.__members__.values():
        raise NotAFrame(data[:4])
    return Frame(stream=Stream(stream), task=task, offset=offset, at=from_micros(at), data=b""), length


def from_copy(line: bytes) -> Frame:
    """Return the frame in a line that a supervisor with --copy wrote to its stdout."""
    try:
        whole = binascii.a2b_base64(line.strip(), strict_mode=True)
    except binascii.Error as error:
        raise NotAFrame(line[:40]) from error
    if len(whole) < HEADER.size:
        raise NotAFrame(line[:40])
    frame, length = parse_header(whole[: HEADER.size])
    if len(whole) != HEADER.size + length:
        raise NotAFrame(line[:40])
    return msgspec.structs.replace(frame, data=whole[HEADER.size :])


class FrameReader:
    """Reads a log that may still grow, from given offsets of its streams on, each byte once.

    `torn` says that bytes follow which are no frame (yet): a write that is under way, or one that never ended.
    """

    def __init__(self, path: Path, *, stdout: int = 0, stderr: int = 0, events: int = 0) -> None:
        self.path = path
        self.offsets = {Stream.STDOUT: stdout, Stream.STDERR: stderr, Stream.EVENTS: events}
        self.position = 0
        self.torn = False

    def read(self, most: int = MOST) -> list[Frame]:
        """Return the next whole frames, with about `most` bytes in all; none if there is nothing new."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        try:
            return self._read(fd, most)
        finally:
            os.close(fd)

    def _read(self, fd: int, most: int) -> list[Frame]:
        frames: list[Frame] = []
        self.torn = False
        while most > 0 and (found := self._header(fd)):
            frame, length = found
            known = min(max(self.offsets[frame.stream] - frame.offset, 0), length)
            data = os.pread(fd, length - known, self.position + HEADER.size + known)
            if len(data) < length - known:
                self.torn = True
                break
            self.position += HEADER.size + length
            if data:
                self.offsets[frame.stream] = frame.offset + length
                frames.append(msgspec.structs.replace(frame, offset=frame.offset + known, data=data))
                most -= len(data)
        return frames

    def _header(self, fd: int) -> tuple[Frame, int] | None:
        data = os.pread(fd, HEADER.size, self.position)
        try:
            return parse_header(data)
        except (NotAFrame, struct.error):
            self.torn = len(data) > 0
            return None
