"""Ships an attempt's output: frames of bytes become log lines and events in the job's record.

Lines that are JSON objects with an `event` key are events; all others are log lines, with invalid UTF-8 replaced.
Offsets end at line ends. In a pipeline each line carries its task, and no line spans two tasks. Above its cap the log
is cut with a visible note; events have a cap of their own, beyond which only usage is still counted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from holdfast.model import NewEvent
from holdfast.runner.base import AttemptHandle
from holdfast.runner.frames import Frame, Stream
from holdfast.runner.function import MAX_NAME, MOST_USED, OURS
from holdfast.runner.secrets import NO_MASK, Mask
from holdfast.worker.event_writer import EventWriter
from holdfast.worker.last_error import TAIL, LastError
from holdfast.worker.log_cap import LogCap

MAX_LINE = 65_536
"""Longer lines are split here, so that an endless line does not fill the memory."""
BLOCK = 512 * 1024
KEPT_WITHOUT_ROOM = 64 * 1024
"""Bytes of log kept per attempt while the database's disk is below its reserve."""
NAMES = {Stream.STDOUT: "stdout", Stream.STDERR: "stderr"}


class LineSplitter:
    """Splits the bytes of one stream into lines. `end` is the offset where the last complete line ended."""

    def __init__(self, end: int, mask: Mask = NO_MASK) -> None:
        self.end = end
        self._tail = b""
        self._mask = mask

    def feed(self, offset: int, data: bytes) -> tuple[list[bytes], int]:
        """Return the lines that are complete now, and how many bytes before them are missing from the log."""
        lines: list[bytes] = []
        missing = offset - self.end - len(self._tail)
        if missing > 0:
            lines += self.rest()
            self.end = offset
        buffer = self._tail + data
        cut = buffer.rfind(b"\n") + 1
        whole, self._tail = buffer[:cut], buffer[cut:]
        if whole:
            self.end += len(whole)
            for line in whole[:-1].split(b"\n"):
                lines += self._pieces(line)
        while len(self._tail) > MAX_LINE + self._mask.longest:
            cut = self._cut(self._tail)
            lines.append(self._tail[:cut])
            self._tail = self._tail[cut:]
            self.end += cut
        return lines, max(missing, 0)

    def _pieces(self, line: bytes) -> list[bytes]:
        """Split a line that is too long."""
        pieces = []
        while len(line) > MAX_LINE:
            cut = self._cut(line)
            pieces.append(line[:cut])
            line = line[cut:]
        return [*pieces, line]

    def _cut(self, line: bytes) -> int:
        """Return where to split a line that is too long: never inside a character or a secret."""
        cut = self._mask.cut(line, MAX_LINE)
        while cut > MAX_LINE - 4 and line[cut] & 0xC0 == 0x80:
            cut -= 1
        return cut

    def rest(self) -> list[bytes]:
        """Return the remaining bytes as lines, at the end of the stream."""
        tail, self._tail = self._tail, b""
        self.end += len(tail)
        return self._pieces(tail) if tail else []


class LogReader:
    """Ships one attempt's output, ours or adopted, from the offsets in the record on."""

    def __init__(
        self,
        running: AttemptHandle,
        event_writer: EventWriter,
        *,
        events_cap: int,
        on_event: Callable[[dict[str, Any]], None],
        mask: Mask,
        tasks: Sequence[str],
        own_line: Callable[[str | None, bytes], bytes],
        short_of_room: Callable[[], bool],
    ) -> None:
        self._short_of_room = short_of_room
        self._since_short = 0
        self._left_out = {Stream.STDOUT: 0, Stream.STDERR: 0}
        self._mask = mask
        self._tasks = tasks
        self._own_line = own_line
        self._task: str | None = None
        self._running = running
        self._event_writer = event_writer
        self._log_cap = event_writer.log_cap
        self._events_cap = LogCap(events_cap, "its events are")
        self._on_event = on_event
        stdout, stderr = event_writer.committed
        self._lines = {Stream.STDOUT: LineSplitter(stdout, mask), Stream.STDERR: LineSplitter(stderr, mask)}
        self.more = False
        self._ended = False
        self.last_error = LastError()

    async def ship(self) -> bool:
        """Ship a bounded part of the available output; `more` is true if there is more. False: the lease is lost."""
        if not self._short_of_room():
            self._since_short = 0
            self._note_left_out()
        frames = await self._running.frames(BLOCK)
        self.more = sum(len(frame.data) for frame in frames) >= BLOCK
        self._ended = not frames
        self._take(frames)
        return await self._flush()

    async def ship_rest(self) -> bool:
        """Ship to the end of a log that no longer grows, including an unterminated last line."""
        self._ended = False
        while not self._ended:
            if not await self.ship():
                return False
        self._add_rest()
        self._note_left_out()
        return await self._flush()

    async def note_missing(self, said: tuple[int, int]) -> bool:
        """Note what is missing at the end of a log: on a disk that stayed full, no frame follows the gap."""
        for stream, length in zip((Stream.STDOUT, Stream.STDERR), said, strict=True):
            missing = length - self._lines[stream].end
            if missing > 0:
                self._lines[stream].end = length
                self._note(stream, f"{missing} bytes of output were not kept", missing=missing)
        return await self._flush()

    async def _flush(self) -> bool:
        return await self._event_writer.flush((self._lines[Stream.STDOUT].end, self._lines[Stream.STDERR].end))

    def _take(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if frame.stream is Stream.EVENTS:
                self._on_event(frame.event)
                continue
            self._switch_to(frame.task)
            lines, missing = self._lines[frame.stream].feed(frame.offset, frame.data)
            if missing:
                self._note(frame.stream, f"{missing} bytes of output were not kept", missing=missing)
            self._add(frame.stream, lines)

    def _switch_to(self, task: int) -> None:
        """Switch to the output of another task; an unterminated line of the previous one becomes a line."""
        name = self._tasks[task] if task < len(self._tasks) else None
        if name != self._task:
            if self._task is not None:
                self._add_rest()
            self._task = name

    def _add_rest(self) -> None:
        for stream, lines in self._lines.items():
            self._add(stream, lines.rest())

    def _add(self, stream: Stream, lines: Sequence[bytes]) -> None:
        """Add lines as events; adjacent log lines share one event."""
        if stream is Stream.STDERR:
            lines = [self._own_line(self._task, line) for line in lines]
        lines = [self._mask.mask_bytes(line) for line in lines]
        if stream is Stream.STDERR:
            self._note_errors(lines)
        log = _LogLines()
        for line in lines:
            if (event := as_event(line)) is not None:
                self._put_log(stream, log)
                self._put_event(event, len(line))
            elif not self._log_cap.cut and not self._leaves_out(stream, len(line) + 1):
                self._add_log_line(stream, log, line)
        self._put_log(stream, log)

    def _add_log_line(self, stream: Stream, log: "_LogLines", line: bytes) -> None:
        if not self._log_cap.fits(len(line) + 1):
            self._put_log(stream, log)
            self._note_cut(stream, self._log_cap)
            return
        log.add(line)
        if log.size >= MAX_LINE:
            self._put_log(stream, log)

    def _leaves_out(self, stream: Stream, size: int) -> bool:
        """Return whether to drop a line: below the reserve of the database's disk, only a small amount is kept."""
        if not self._short_of_room():
            return False
        self._since_short += size
        if self._since_short <= KEPT_WITHOUT_ROOM:
            return False
        self._left_out[stream] += size
        return True

    def _note_left_out(self) -> None:
        for stream, missing in self._left_out.items():
            if missing:
                self._left_out[stream] = 0
                text = f"{missing} bytes of output were not kept: the disk of the database was below its reserve"
                self._note(stream, text, missing=missing)

    def _note_errors(self, lines: Sequence[bytes]) -> None:
        """Remember the last line of stderr, even above the cap of the log."""
        last = [line.decode("utf-8", "replace") for line in lines[-TAIL:] if as_event(line) is None]
        self.last_error.add_lines(self._task, last)

    def _put_log(self, stream: Stream, log: "_LogLines") -> None:
        if log.lines:
            data = {"stream": NAMES[stream], "lines": log.lines}
            self._event_writer.add(NewEvent(type="log", data=data, task=self._task), log.size)
        log.clear()

    def _put_event(self, event: NewEvent, size: int) -> None:
        # Mask again after decoding: JSON can escape any character.
        event = NewEvent(type=event.type, data=self._mask.data(event.data), task=self._task)
        if self._events_cap.fits(size):
            self._event_writer.add(event)
            return
        if event.type == "usage":
            self._event_writer.charge(event.data)
        self._note_cut(Stream.STDOUT, self._events_cap)

    def _note_cut(self, stream: Stream, cap: LogCap) -> None:
        if (note := cap.note()) is not None:
            self._note(stream, note, capped=True)

    def _note(self, stream: Stream, text: str, **more: Any) -> None:
        data = {"stream": NAMES[stream], "lines": [f"[holdfast: {text}]"], **more}
        self._event_writer.add(NewEvent(type="log", data=data, task=self._task))


class _LogLines:
    """Log lines that go into one event."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.size = 0

    def add(self, line: bytes) -> None:
        self.lines.append(line.decode("utf-8", "replace"))
        self.size += len(line) + 1

    def clear(self) -> None:
        self.lines, self.size = [], 0


def as_event(line: bytes) -> NewEvent | None:
    """Parse a line of output as an event. Return None for a log line, or for a malformed event."""
    if not line.startswith(b"{") or b'"event"' not in line:
        return None
    try:
        data = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    name = data.pop("event", None)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or name in OURS or not name.isprintable():
        return None
    if name == "usage" and not all(_is_amount(key, value) for key, value in data.items()):
        return None
    return NewEvent(type=name, data=data)


def _is_amount(name: str, value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value <= MOST_USED
        and 0 < len(name) <= MAX_NAME
        and name.isprintable()
    )
