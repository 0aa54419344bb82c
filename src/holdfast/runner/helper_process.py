"""A process of the supervisor's program that serves this worker over a socket: the launcher and the remover.

It exits when its socket closes, so it does not outlive the worker. One that was killed is started again by the next
message.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.runner import supervisor
from holdfast.runner.exits import ProcessExits

MOST = 128 * 1024
"""Bytes of the largest message that is received."""


class HelperProcess:
    """A running helper. `on_gone` is called once at its end, after all messages that it sent before."""

    def __init__(
        self,
        children: ProcessExits,
        arguments: Sequence[str],
        *,
        on_message: Callable[[bytes], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._on_message = on_message
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[bytes] = deque()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.pid = _spawn(arguments, theirs)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._receive)
        children.watch(self.pid).add_done_callback(lambda _: self._ended())

    def send(self, message: bytes) -> None:
        """Send a message, now or when the helper has read those before it."""
        if self._waiting or not self._sent(message):
            self._waiting.append(message)
            self._loop.add_writer(self._socket, self._send_waiting)

    def kill(self) -> None:
        """Kill it: it does not answer. It is our child, and not reaped yet, so the pid is its own."""
        if self._socket.fileno() >= 0:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the socket, which ends the helper."""
        if self._socket.fileno() >= 0:
            with contextlib.suppress(RuntimeError):
                self._loop.remove_reader(self._socket)
                self._loop.remove_writer(self._socket)
            self._socket.close()

    def _sent(self, message: bytes) -> bool:
        try:
            self._socket.send(message)
        except BlockingIOError:
            return False
        except OSError:  # It has died; `on_gone` follows.
            return True
        return True

    def _send_waiting(self) -> None:
        while self._waiting and self._sent(self._waiting[0]):
            self._waiting.popleft()
        if not self._waiting:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        """Read all messages that are there."""
        while True:
            try:
                message = self._socket.recv(MOST)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._loop.remove_reader(self._socket)  # Its end is noticed as the end of a child.
                return
            self._on_message(message)

    def _ended(self) -> None:
        if self._socket.fileno() >= 0:
            self._receive()
            self.close()
            self._on_gone()


def _spawn(arguments: Sequence[str], theirs: socket.socket) -> int:
    program = str(supervisor.path())
    actions = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
    return os.posix_spawn(
        program, [program, *arguments], {}, file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0), *actions]
    )
