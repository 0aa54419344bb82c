"""A command in a terminal of its own, of a given size."""

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Mapping

from tests.support.up_process import PATIENCE, PROGRAM


class TerminalProcess:
    """A command of holdfast that a person watches and types into."""

    def __init__(self, env: Mapping[str, str], *arguments: str, columns: int = 80, lines: int = 40) -> None:
        self.seen = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            known = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
            os.execve(PROGRAM[0], [*PROGRAM, *arguments], known | {"TERM": "xterm", **_asked(env)})

    def until(self, text: str, *, more: bool = False) -> None:
        """Read until a text has appeared; with `more`, once more than before."""
        before = self.seen.count(text) if more else 0
        deadline = time.monotonic() + PATIENCE
        while self.seen.count(text) <= before:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._fd], [], [], 0.2)[0]:
                self.seen += os.read(self._fd, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def exit_code(self) -> int:
        try:
            while chunk := os.read(self._fd, 4096):
                self.seen += chunk.decode(errors="replace")
        except OSError:
            pass  # A terminal whose program has ended.
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _asked(env: Mapping[str, str]) -> dict[str, str]:
    return {"NO_COLOR": env["NO_COLOR"]} if "NO_COLOR" in env else {}
