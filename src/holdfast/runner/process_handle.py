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
from holdfast.runner.output_sources import collect_folder
from holdfast.runner.supervisor.protocol import ExitCause, ExitStatus
from holdfast.runner.wire import Command
from holdfast.runner.workspace import WORKSPACE, socket_folder

if TYPE_CHECKING:
    from holdfast.runner.process import ProcessRunner

log = logging.getLogger(__name__)

START_STEPS = (0.001, 0.001, 0.002, 0.002, 0.005, 0.005, 0.01)


class ProcessHandle:
    """One attempt on this host."""

    def __init__(self, runner: "ProcessRunner", identity: Identity, *, stdout: int, stderr: int) -> None:
        self.identity = identity
        self.folder = runner.folder(identity)
        self._runner = runner
        self._log: FrameReader = self.folder.frames(stdout=stdout, stderr=stderr)
        self._child: asyncio.Future[int] | None = None
        self._watch: SupervisorWatch | None = None

    @property
    def workspace(self) -> Path:
        return self.folder.path / WORKSPACE

    def read_state(self) -> AttemptState:
        """Read the state from the folder. The lock is checked first: a supervisor may end meanwhile, not restart."""
        alive = self.folder.alive()
        if self.folder.exit() is not None:
            return "exited"
        if alive:
            return "running"
        if self.folder.forbidden():
            return "forbidden"
        if self.folder.started() is None:
            return "missing"
        return "exited" if self.folder.exit() is not None else "died"

    def watch_child(self, status: "asyncio.Future[int]") -> None:
        self._child = status

    async def wait_until_begun(self) -> None:
        """Wait until our supervisor has begun, or has exited because another one was first."""
        assert self._child is not None
        for step in start_steps():
            if self._child.done():
                break
            if (self.folder.path / "started").exists():
                return
            await asyncio.wait([self._child], timeout=step)
        status = self._child.result()
        if self.read_state() in ("exited", "died"):
            return  # It ran and has ended already: the status is the command's.
        if status == ExitStatus.LEFT_LATE:
            raise StartTooLate
        if status == ExitStatus.LEFT_FULL:
            raise NoSpace("the supervisor had no space for its files: No space left on device")
        if status == ExitStatus.LEFT_BROKEN:
            raise CannotStart("start_failed", "the supervisor could not use the attempt's folder")
        if status in (ExitStatus.LEFT_HELD, ExitStatus.LEFT_STARTED):
            self._child = None
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
        try:
            if os.stat(self._log.path).st_size == self._log.position:
                return ()
        except FileNotFoundError:
            return ()
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
            self._child.add_done_callback(lambda _: on_end())
        else:
            self._watch = SupervisorWatch(self.folder, on_end)

    @property
    def over(self) -> bool:
        if self._child is not None:
            return self._child.done()
        return self._watch is not None and self._watch.over

    async def outputs(self, collected: CollectedOutputs) -> None:
        if self.folder.left_nothing():
            return
        await self._runner.slowly(lambda: collect_folder(self.folder.path / "work", collected))

    async def limits(self) -> AttemptLimits:
        return await self._runner.in_thread(self.folder.limits)

    async def size(self, most: int) -> int:
        return await self._runner.measure(lambda: folder_size(self.folder.path, most))

    async def secrets(self) -> Sequence[str]:
        return await self._runner.in_thread(self.folder.secrets)

    async def collect(self) -> AttemptEnd | None:
        state = self.read_state()
        if state == "running":
            return None
        if state == "died":
            return await self._lost()
        if state == "forbidden":
            return AttemptEnd(cause=Cause.DRAINED)  # Nothing ran: a previous owner ended it just before we started it.
        if state == "missing":
            return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message="the attempt's folder is gone"))
        ended = self.folder.exit()
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
        over = [socket_folder(self.identity.mark)]
        if had_other_owners:
            await self._runner.slowly(self.folder.reduce_to_marker)
        else:
            over.append(self.folder.path)
        await self._runner.removals.remove(*over)
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
