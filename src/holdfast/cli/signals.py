"""Signal handling for commands that must clean up when they are interrupted.

The first signal raises `EndedBySignal` wherever the command is, and its `finally` blocks clean up; later signals are
ignored. There is no event loop here: such commands do not need one.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from holdfast.cli.session import fail

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 1.0
"""Seconds between polls: a signal that arrives just before we wait does not wake us."""
PATIENCE = 10.0
"""Seconds that our child command may take to end after a signal before it is killed."""
CANNOT_RUN = 127
"""The exit code of a shell for a missing command."""


class EndedBySignal(BaseException):
    """A signal asked us to end. A BaseException, so that error handlers do not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def code(self) -> int:
        """The exit code that a shell reports for a program ended by this signal."""
        return 128 + self.number


@contextmanager
def ended_by_signals() -> Iterator[Callable[[], None]]:
    """Raise `EndedBySignal` at the first terminating signal. A SIGHUP that was ignored stays ignored, for `nohup`.

    Yield a function to call before the clean-up: after that, signals are ignored.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = [number for number in SIGNALS if number != signal.SIGHUP or before[number] is not signal.SIG_IGN]

    def be_deaf() -> None:
        for number in heard:
            signal.signal(number, signal.SIG_IGN)

    def end(number: int, frame: FrameType | None) -> None:
        be_deaf()
        raise EndedBySignal(number)

    for number in heard:
        signal.signal(number, end)
    try:
        yield be_deaf
    finally:
        for number in heard:
            signal.signal(number, before[number])


def wait_for_a_signal() -> NoReturn:
    """Wait for a terminating signal."""
    while True:
        time.sleep(POLL_SECONDS)


def run_beside(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a command and return its exit code. Ctrl-C reaches it directly; other signals are passed on to it."""
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        process = subprocess.Popen(command, env={**os.environ, **env})
    except OSError as error:
        fail(f"cannot run {command[0]}: {error.strerror}", CANNOT_RUN)
    try:
        code = _wait(process)
    except EndedBySignal as ended:
        code = _end(process, ended.number)
    return code if code >= 0 else 128 - code


def _wait(process: "subprocess.Popen[bytes]") -> int:
    handle = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while not poll.poll(POLL_SECONDS * 1000):
            pass
        return process.wait()
    finally:
        os.close(handle)


def _end(process: "subprocess.Popen[bytes]", number: int) -> int:
    process.send_signal(number)
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
