"""Notices the exits of processes: our own children, and supervisors that another worker started."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.runner.attempt_folder import AttemptFolder

POLL_SECONDS = 1.0
"""Seconds between checks of a supervisor's lock, in addition to its pidfd."""


class SupervisorWatch:
    """Notices the end of a supervisor that is not our child: by pidfd if possible, else by polling its lock."""

    def __init__(self, folder: AttemptFolder, on_end: Callable[[], None]) -> None:
        self._folder = folder
        self._on_end = on_end
        self._gone = False
        self._looked = time.monotonic()
        self._pidfd = _pidfd_of(folder)
        if self._pidfd is not None:
            asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        self.close()
        self._gone = True
        self._on_end()

    @property
    def over(self) -> bool:
        if not self._gone and (self._pidfd is None or time.monotonic() - self._looked > POLL_SECONDS):
            self._looked = time.monotonic()
            if not self._folder.alive():
                self.close()
                self._gone = True
        return self._gone

    def close(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


class ProcessExits:
    """Reaps the child processes of this worker."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}

    def watch(self, pid: int) -> "asyncio.Future[int]":
        loop = asyncio.get_running_loop()
        status: asyncio.Future[int] = loop.create_future()
        pidfd = self._pidfds[pid] = os.pidfd_open(pid)

        def ended() -> None:
            loop.remove_reader(pidfd)
            os.close(self._pidfds.pop(pid))
            _, found = os.waitpid(pid, 0)
            if not status.done():
                status.set_result(os.waitstatus_to_exitcode(found))

        loop.add_reader(pidfd, ended)
        return status

    def close(self) -> None:
        for pidfd in self._pidfds.values():
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()


def _pidfd_of(folder: AttemptFolder) -> int | None:
    """Open a pidfd of a folder's supervisor; None unless its start time and lock prove that it is the right process."""
    started = folder.started()
    if started is None:
        return None
    try:
        pidfd = os.pidfd_open(started.supervisor_pid)
    except OSError:
        return None
    try:
        line = Path(f"/proc/{started.supervisor_pid}/stat").read_text()
        ticks = int(line.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        ticks = -1
    if ticks == started.supervisor_start_ticks and folder.alive():
        return pidfd
    os.close(pidfd)
    return None
