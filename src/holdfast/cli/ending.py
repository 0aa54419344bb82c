"""For commands that have something to put away, whenever and however they are asked to end.

The first signal raises `Ended` wherever the command is, and the way out puts things away; later ones change nothing.
There is no event loop in here: nothing that such a command waits for comes from one.
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

from holdfast.cli.talk import fail

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK = 1.0
"""Seconds between looks: a signal that comes just before we begin to wait does not wake us."""
PATIENCE = 10.0
"""Seconds that a command beside us may take to end once we were asked to, before it is killed."""
CANNOT_RUN = 127
"""What a shell answers where there is no such command."""


class Ended(BaseException):
    """Somebody asked us to end. No Exception: whoever handles errors is not meant."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def code(self) -> int:
        """The exit code that a shell gives to a program that a signal ended."""
        return 128 + self.number


@contextmanager
def ended_by_signals() -> Iterator[Callable[[], None]]:
    """Raise `Ended` at the first signal that asks us to end. A SIGHUP that was ignored before stays so: `nohup`.

    Gives what to call before things are put away: from then on no signal does anything.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = [number for number in SIGNALS if number != signal.SIGHUP or before[number] is not signal.SIG_IGN]

    def be_deaf() -> None:
        for number in heard:
            signal.signal(number, signal.SIG_IGN)

    def end(number: int, frame: FrameType | None) -> None:
        be_deaf()
        raise Ended(number)

    for number in heard:
        signal.signal(number, end)
    try:
        yield be_deaf
    finally:
        for number in heard:
            signal.signal(number, before[number])


def wait_for_a_signal() -> NoReturn:
    """Wait until we are asked to end."""
    while True:
        time.sleep(LOOK)


def run_beside(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a command and return its exit code. A Ctrl-C is its own to hear; who asks us to end asks it, too."""
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        process = subprocess.Popen(command, env={**os.environ, **env})
    except OSError as error:
        fail(f"cannot run {command[0]}: {error.strerror}", CANNOT_RUN)
    try:
        code = _wait(process)
    except Ended as ended:
        code = _end(process, ended.number)
    return code if code >= 0 else 128 - code


def _wait(process: "subprocess.Popen[bytes]") -> int:
    handle = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while not poll.poll(LOOK * 1000):
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
