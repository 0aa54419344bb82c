"""One attempt on this host: its state, its output, commands to its supervisor, its end."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.limits import AttemptLimits
from holdfast.model import Cause, Error
from holdfast.runner.attempt_end import to_end
from holdfast.runner.attempt_folder import ExitRecord, decode
from holdfast.runner.base import (
    AttemptEnd,
    AttemptState,
    CannotStart,
    EngineUnreachable,
    Identity,
    NoSpace,
    StartTooLate,
)
from holdfast.runner.collected_outputs import CollectedOutputs
from holdfast.runner.exits import SupervisorWatch
from holdfast.runner.folder_size import folder_size
from holdfast.runner.frames import Frame, FrameReader
from holdfast.runner.launcher import Launch, ReportedEnd
from holdfast.runner.output_sources import collect_folder
from holdfast.runner.supervisor.protocol import ExitCause, ExitStatus
from holdfast.runner.wire import Command
from holdfast.runner.workspace import WORKSPACE, socket_folder

if TYPE_CHECKING:
    from holdfast.runner.process import ProcessRunner

log = logging.getLogger(__name__)

QUICK_READ = 64 * 1024
"""Bytes of log that are read at once, without a thread: the hand-over to one takes longer than the read."""
START_STEPS = (0.001, 0.001, 0.002, 0.002, 0.005, 0.005, 0.01)


class ProcessHandle:
    """One attempt on this host."""

    def __init__(self, runner: "ProcessRunner", identity: Identity, *, stdout: int, stderr: int) -> None:
        self.identity = identity
        self.folder = runner.folder(identity)
        self._runner = runner
        self._log: FrameReader = self.folder.frames(stdout=stdout, stderr=stderr)
        self._child: asyncio.Future[int] | None = None
        self._launch: Launch | None = None
        self._watch: SupervisorWatch | None = None
        self._limits: AttemptLimits | None = None
        self._sockets = True
        """Whether it may have a folder for sockets."""

    @property
    def workspace(self) -> Path:
        return self.folder.path / WORKSPACE

    def read_state(self) -> AttemptState:
        return self._read_end()[0]

    def _read_end(self) -> tuple[AttemptState, ExitRecord | None]:
        """Read the state from the folder, and the exit record if there is one, unless the launcher has reported it.

        The lock is checked first: a supervisor may end meanwhile, not restart.
        """
        if (reported := self._reported) is not None and reported.exit is not None:
            return "exited", decode(reported.exit, ExitRecord, str(self.folder.path / "exit"))
        alive = self.folder.alive()
        if (ended := self.folder.exit()) is not None:
            return "exited", ended
        if alive:
            return "running", None
        if self.folder.forbidden():
            return "forbidden", None
        if self.folder.started() is None:
            return "missing", None
        ended = self.folder.exit()
        return ("exited" if ended is not None else "died"), ended

    def started_by_us(self, limits: AttemptLimits, *, pipeline: bool) -> None:
        """Note what the folder says too: it need not be read after our own start."""
        self._limits = limits
        self._sockets = pipeline

    def watch_child(self, status: "asyncio.Future[int]") -> None:
        self._child = status

    def watch_launch(self, launch: Launch) -> None:
        self._launch = launch
        self._child = launch.status

    @property
    def _reported(self) -> ReportedEnd | None:
        return None if self._launch is None else self._launch.end

    async def wait_until_begun(self) -> None:
        """Wait until our supervisor has begun, or has exited because another one was first."""
        assert self._child is not None
        if self._launch is not None and not self._child.done():
            return None  # It has reported so.
        for step in start_steps():
            if self._child.done():
                break
            if (self.folder.path / "started").exists():
                return None
            await asyncio.wait([self._child], timeout=step)
        if self._child.cancelled():
            self._child = self._launch = None
            return await self._wait_for_other_supervisor()
        await self._check_status(self._child.result())
        return None

    async def _check_status(self, status: int) -> None:
        """Find out whether a supervisor that has exited ran the attempt."""
        if self.read_state() in ("exited", "died"):
            return  # It ran and has ended already: the status is the command's.
        if status == ExitStatus.LEFT_LATE:
            raise StartTooLate
        if status == ExitStatus.LEFT_FULL:
            raise NoSpace("the supervisor had no space for its files: No space left on device")
        if status == ExitStatus.LEFT_BROKEN:
            raise CannotStart("start_failed", "the supervisor could not use the attempt's folder")
        if status in (ExitStatus.LEFT_HELD, ExitStatus.LEFT_STARTED):
            self._child = self._launch = None
            await self._wait_for_other_supervisor()
        elif self.read_state() == "missing":
            raise CannotStart("start_failed", f"the supervisor exited with status {status} before it began")

    async def _wait_for_other_supervisor(self) -> None:
        """Wait for the supervisor that was first; it may still exit without a trace because it is too late."""
        for step in start_steps():
            if not self.folder.alive() or (self.folder.path / "started").exists():
                break
            await asyncio.sleep(step)
        if self.read_state() == "missing":
            raise StartTooLate

    async def frames(self, most: int) -> Sequence[Frame]:
        if (reported := self._reported) is not None and reported.log is not None:
            return self._log.read_from(reported.log, most)
        try:
            new = os.stat(self._log.path).st_size - self._log.position
        except FileNotFoundError:
            return ()
        if new == 0:
            return ()
        if new <= QUICK_READ:
            return self._log.read(most)
        return await self._runner.in_thread(lambda: self._log.read(most))

    async def send(self, command: Command) -> str:
        try:
            return await self._runner.in_thread(lambda: self.folder.send(command))
        except FileNotFoundError:
            return ""  # The new owner has removed the folder: we will notice that the lease is lost.
        except OSError as error:
            raise EngineUnreachable(f"cannot write a command into the attempt's folder: {error.strerror}") from error

    def send_from_thread(self, command: Command) -> None:
        """Send a command from any thread. If that fails, the next heartbeat sends it again."""
        try:
            self.folder.send(command)
        except OSError as error:
            log.warning(
                "cannot send a command to the supervisor of %s; the next beat retries: %s",
                self.identity.mark,
                error.strerror,
            )

    def watch(self, on_end: Callable[[], None]) -> None:
        if self._child is not None:
            self._child.add_done_callback(lambda child: self._child_ended(child, on_end))
        else:
            self._watch = SupervisorWatch(self.folder, on_end)

    def _child_ended(self, child: "asyncio.Future[int]", on_end: Callable[[], None]) -> None:
        if child.cancelled():  # The launcher died. The supervisor runs on, as one that another worker started.
            self._child = None
            self._watch = SupervisorWatch(self.folder, on_end)
        on_end()

    @property
    def over(self) -> bool:
        if self._child is not None:
            return self._child.done() and not self._child.cancelled()
        return self._watch is not None and self._watch.over

    async def outputs(self, collected: CollectedOutputs) -> None:
        nothing = self.folder.left_nothing() if (reported := self._reported) is None else reported.nothing_left
        if nothing:
            return
        await self._runner.slowly(lambda: collect_folder(self.folder.path / "work", collected))

    async def limits(self) -> AttemptLimits:
        if self._limits is not None:
            return self._limits
        return await self._runner.in_thread(self.folder.limits)

    async def size(self, most: int) -> int:
        return await self._runner.measure(lambda: folder_size(self.folder.path, most))

    async def secrets(self) -> Sequence[str]:
        return await self._runner.in_thread(self.folder.secrets)

    async def collect(self) -> AttemptEnd | None:
        state, ended = self._read_end()
        if state == "running":
            return None
        if state == "died":
            return await self._lost()
        if state == "forbidden":
            return AttemptEnd(cause=Cause.DRAINED)  # Nothing ran: a previous owner ended it just before we started it.
        if state == "missing":
            return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message="the attempt's folder is gone"))
        assert ended is not None
        fell = ended.cause is ExitCause.SERVICE_ENDED
        return to_end(ended, await self._runner.in_thread(self.folder.service) if fell else b"")

    async def _lost(self) -> AttemptEnd | None:
        """Kill the processes of a supervisor that died without an exit record; then the attempt is lost."""
        started = await self._runner.in_thread(self.folder.started)
        rebooted = started is not None and started.boot_id != self._runner.boot
        if not rebooted:
            uid = self._runner.users.uid_of(self.folder.path)
            left = await self._runner.slowly(lambda: self.folder.kill_leftovers(self.identity.mark, uid))
            if left:
                return None
        message = "the host was rebooted" if rebooted else "its supervisor was killed, so its end cannot be known"
        return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message=message))

    async def remove(self, *, had_other_owners: bool) -> None:
        """Remove the folder. If a suspended worker might still start it, the start marker stays for a while."""
        self.close()
        users, uid = self._runner.users, self._runner.users.uid_of(self.folder.path)
        over = [socket_folder(self.identity.mark)] if self._sockets else []
        keep = None
        if had_other_owners:
            await self._runner.slowly(self.folder.reduce_to_marker)
        elif self._reported is not None:
            keep = self.folder.path  # Only one supervisor ever had it, and the launcher has reaped that one.
        else:
            over.append(self.folder.path)
        await self._runner.removals.remove(*over, keep=keep)
        if uid is not None:
            await self._runner.in_thread(lambda: users.free(self.folder.path, uid))

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def start_steps() -> Any:
    yield from START_STEPS
    while True:
        yield 0.02
