"""Starts attempts through the launcher, a process of this worker (`launcher.c`), with one message per start.

The launcher's child makes the attempt's folder and becomes its supervisor. Nothing depends on the launcher after that:
if it dies, the files say what it had started, as they do after the death of a worker.
"""

import asyncio
import itertools
import logging
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.runner.exits import ProcessExits
from holdfast.runner.helper_process import HelperProcess
from holdfast.runner.supervisor.protocol import LAUNCH_TITLE, MAX_LAUNCH, VERSION, LaunchKey, LaunchReport

log = logging.getLogger(__name__)

HEAD = struct.Struct("=IIQqII")
NOT_INCLUDED = 0xFFFFFFFF
TITLE_ROOM = 4096
"""Room for the path of a folder in the command line of a supervisor that was forked and not executed."""
REPLY_SECONDS = 5.0
"""A launcher that has not begun a start after this time hangs; it is killed."""
QUICK_SECONDS, QUICK_DEATHS, PAUSE_SECONDS = 1.0, 3, 60.0
"""A launcher that dies so quickly so many times in a row is not started again for a while."""

LaunchRecords = Mapping[LaunchKey, bytes]


class LauncherGone(Exception):
    """The launcher has died or does not answer. The files tell whether the attempt was started."""


class LaunchFailed(Exception):
    """The folder could not be made; nothing runs."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.errno = number


class ReportedEnd(msgspec.Struct, frozen=True):
    """What the launcher read after the end of a supervisor. None: it is not part of the report; read the file."""

    exit: bytes | None
    log: bytes | None
    nothing_left: bool


class Launch:
    """One start. `status` is the supervisor's exit status; it is cancelled if the launcher dies first."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.status: asyncio.Future[int] = loop.create_future()
        self.end: ReportedEnd | None = None


class Launcher:
    """The launcher of this worker; started with the first start."""

    def __init__(self, children: ProcessExits, spare_folders: Path) -> None:
        self._children = children
        self._spare_folders = spare_folders
        self._process: HelperProcess | None = None
        self._launches: dict[int, Launch] = {}
        self._ids = itertools.count(1)
        self._began = 0.0
        self._deaths = 0
        self._paused_until = 0.0

    @property
    def usable(self) -> bool:
        return time.monotonic() >= self._paused_until

    async def launch(self, records: LaunchRecords, *, within: float) -> Launch:
        """Start an attempt, and return when it has begun or ended. Raise LaunchFailed or LauncherGone if it has not.

        After LauncherGone it may begin nevertheless, until its `start_by`.
        """
        number = next(self._ids)
        message = encode_launch(number, records)
        launch = self._launches[number] = Launch()
        self._running().send(message)
        try:
            async with asyncio.timeout(min(within, REPLY_SECONDS)):
                await launch.begun
        except TimeoutError:
            log.warning("the launcher did not answer; killing it. Starts continue without it")
            if self._process is not None:
                self._process.kill()
            raise LauncherGone from None
        except (LaunchFailed, asyncio.CancelledError):
            self._launches.pop(number, None)
            raise
        return launch

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _running(self) -> HelperProcess:
        if self._process is None:
            self._began = time.monotonic()
            arguments = ["--launch", str(self._spare_folders), " " * TITLE_ROOM]
            self._process = HelperProcess(self._children, arguments, on_message=self._on_report, on_gone=self._on_gone)
        return self._process

    def _on_report(self, message: bytes) -> None:
        kind, nothing_left, number, value, exit_length, log_length = HEAD.unpack_from(message)
        launch = self._launches.get(number)
        if launch is None:
            return
        if kind == LaunchReport.FAILED:
            del self._launches[number]
            if not launch.begun.done():
                launch.begun.set_exception(LaunchFailed(value))
            return
        if kind == LaunchReport.ENDED:
            del self._launches[number]
            launch.end = _end_in(message, exit_length, log_length, bool(nothing_left))
            if not launch.status.done():
                launch.status.set_result(value)
        if not launch.begun.done():
            launch.begun.set_result(None)

    def _on_gone(self) -> None:
        self._process = None
        lived = time.monotonic() - self._began
        self._deaths = self._deaths + 1 if lived < QUICK_SECONDS else 1
        log.warning("the launcher has died after %.1f s; its %d attempts run on", lived, len(self._launches))
        if self._deaths >= QUICK_DEATHS:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            log.error("the launcher died %d times; starting attempts without it", self._deaths)
        launches, self._launches = self._launches, {}
        for launch in launches.values():
            if not launch.begun.done():
                launch.begun.set_exception(LauncherGone())
            launch.status.cancel()


def encode_launch(number: int, records: LaunchRecords) -> bytes:
    parts = [b"%s %d\n" % (LAUNCH_TITLE.encode(), VERSION)]
    for key, value in {"id": b"%d" % number, **records}.items():
        parts.append(b"%s %d\n%s\n" % (key.encode(), len(value), value))
    parts.append(b"end 0\n\n")
    return b"".join(parts)


def fits(records: LaunchRecords) -> bool:
    """Return whether a message can carry these records; others are staged by the worker itself."""
    return sum(map(len, records.values())) < MAX_LAUNCH - 1024 and not any(b"\0" in value for value in records.values())


def _end_in(message: bytes, exit_length: int, log_length: int, nothing_left: bool) -> ReportedEnd:
    at = HEAD.size
    exit = log = None
    if exit_length != NOT_INCLUDED:
        exit = message[at : at + exit_length]
        at += exit_length
    if log_length != NOT_INCLUDED:
        log = message[at : at + log_length]
    return ReportedEnd(exit, log, nothing_left)
