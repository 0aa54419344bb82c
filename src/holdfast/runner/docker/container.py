"""One attempt in a container, started by us or adopted: its output, its commands, its end.

Output is read from the engine's log as it is written; gaps (rotation, or the engine was down) are filled from the
supervisor's own log in the volume. An end counts only if two sources agree: the supervisor's `exit` in the volume and
the engine. While the engine is unreachable, the state of the attempt is unknown, and it is not lost.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast import decoding
from holdfast.limits import AttemptLimits
from holdfast.model import Cause, Error
from holdfast.runner.attempt_end import to_end
from holdfast.runner.attempt_folder import ExitRecord, StartRecord, UnreadableRecord, decode
from holdfast.runner.base import AttemptEnd, AttemptState, EngineUnreachable, Identity, NoSpace, StartTooLate
from holdfast.runner.collected_outputs import CollectedOutputs
from holdfast.runner.docker.archive import Archive, only_file
from holdfast.runner.docker.container_config import ATTEMPT, VOLUME, WORKSPACE_LABEL, limits_from
from holdfast.runner.docker.container_log import ContainerLog
from holdfast.runner.docker.container_outputs import ContainerOutputs
from holdfast.runner.docker.engine import ContainerInfo, EngineError, NoSuchObject
from holdfast.runner.folder_size import size_of_existing
from holdfast.runner.frames import Frame
from holdfast.runner.supervisor.protocol import ExitCause, ExitStatus
from holdfast.runner.wire import Command, encode_command
from holdfast.timing import backoff, jitter

if TYPE_CHECKING:
    from holdfast.runner.docker.runner import DockerRunner

T = TypeVar("T")
log = logging.getLogger(__name__)

BEGIN_SECONDS = 10.0
"""How long to wait for the first output of a start before we look into its volume."""
WAIT_SECONDS = 60.0
"""How long a call waits for the end before we inspect the container."""
SHORT_WAIT = 1.0
"""Waits that end sooner than this are repeated with a backoff."""
UNKNOWN = (0, 255)
"""Exit codes of engines that do not know how a container ended: they do not contradict the supervisor."""
BEING_REMOVED = ("removing", "dead")
"""A container is `dead` if the engine failed to remove it: nothing of it runs, and its exit code proves nothing."""
NEVER_BEGAN = (
    *(ExitStatus.LEFT_FULL, ExitStatus.LEFT_HELD, ExitStatus.LEFT_STARTED, ExitStatus.LEFT_BROKEN),
    ExitStatus.LEFT_LATE,
)
"""Statuses with which a supervisor exits before it has begun."""


class EngineDisagrees(Exception):
    """The engine and the volume contradict each other. If that lasts, a person has to look."""


class ContainerHandle:
    def __init__(
        self,
        runner: "DockerRunner",
        identity: Identity,
        seen: ContainerInfo | None,
        domain: str,
        *,
        stdout: int = 0,
        stderr: int = 0,
        ours: bool = False,
    ) -> None:
        self.identity = identity
        self._runner = runner
        self._engine = runner.engine
        self._domain = domain
        self.id = seen.id if seen is not None else ""
        self._seen = seen
        self._ours = ours
        self._ended = asyncio.Event()
        if seen is None or not seen.runs:
            self._ended.set()
        self._log = ContainerLog(
            runner,
            self.id,
            stdout=stdout,
            stderr=stderr,
            ended=self._ended,
            exists=lambda: self._seen is not None,
            read_exit=self._read_exit,
            on_event=self._on_event,
            on_end=self._log_broke_off,
        )
        self._signal: asyncio.Event | None = None
        self._exit: ExitRecord | None = None
        self._sent: set[str] = set()
        self._ahead: float | None = None
        self._on_end: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        # The execution that owns this object closes it: there is no task group that spans both.
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened = False

    @property
    def workspace(self) -> Path:
        return Path(self._seen.labels.get(WORKSPACE_LABEL, "")) if self._seen else Path()

    async def limits(self) -> AttemptLimits:
        return limits_from(self._seen.labels) if self._seen is not None else AttemptLimits()

    async def size(self, most: int) -> int | None:
        """Measure the volume and the workspace if they are on this host."""
        if not self._engine.host.startswith("unix://"):
            return None
        folders = (Path((await self._mounts()).get(VOLUME, "")), self.workspace)
        return await asyncio.to_thread(size_of_existing, folders, most)

    async def _mounts(self) -> Mapping[str, str]:
        """Return the container's mounts, which are looked up after its start."""
        if self._seen is not None and self._seen.mounts is None:
            try:
                mounts = (await self._engine.inspect(self.id)).mounts
            except NoSuchObject:
                return {}
            except EngineError as error:
                raise EngineUnreachable(f"the Docker engine at {self._engine.host} returned: {error}") from error
            if self._seen is not None and self._seen.mounts is None:  # It may have ended meanwhile.
                self._seen = msgspec.structs.replace(self._seen, mounts=mounts)
        return (self._seen.mounts if self._seen is not None else None) or {}

    # Looking

    async def read_state(self) -> AttemptState:
        """Return the state. A container that was only created, or whose supervisor never began, ran nothing."""
        seen = self._seen
        if seen is None or seen.status in BEING_REMOVED:
            return "missing"
        if seen.status == "created":
            return await self._state_in_volume()
        if seen.runs:
            return "running"
        if await self._read_exit() is not None:
            return "exited"
        if seen.exit_code in (*NEVER_BEGAN, *UNKNOWN) and await self._file("started", StartRecord) is None:
            return "missing"
        return "died"

    async def _state_in_volume(self) -> AttemptState:
        """Check the volume: an engine that crashed during a start may report the container as never started."""
        if await self._read_exit() is not None:
            return "exited"
        if await self._file("started", StartRecord) is None:
            return "missing"
        raise EngineDisagrees(
            f"container {self.id[:12]} has begun, but its engine says that it was never started: it may still run"
        )

    def open(self) -> None:
        """Start reading the log and waiting for the end."""
        if self._opened or self._seen is None:
            return
        self._opened = True
        self._spawn(self._log.read())
        if not self.over:
            self._spawn(self._await_end())

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_until_begun(self) -> None:
        """Wait until the supervisor began (by its output or `started`) or ended. Raise if it never began."""
        self.open()
        try:
            while not (self.over or await self._wait_for_output() or await self._has_started()):
                pass
            if self.over and await self._ended_unbegun():
                if self._seen is not None and self._seen.exit_code == ExitStatus.LEFT_FULL:
                    raise NoSpace("the supervisor had no space for its files in the container's volume")
                raise StartTooLate
        except BaseException:  # Nobody else can close it yet.
            self.close()
            raise

    async def _ended_unbegun(self) -> bool:
        """Return whether the container ended before its supervisor began."""
        await self._log.finished()  # It has the exit record, which takes longer to read from the volume.
        return await self.read_state() == "missing"

    async def _wait_for_output(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_SECONDS):
                return await self._log.output_seen.wait()
        return False

    async def _has_started(self) -> bool:
        with contextlib.suppress(EngineError):
            return await self._file("started", StartRecord) is not None
        return False

    def watch(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self.open()

    @property
    def over(self) -> bool:
        return self._ended.is_set()

    async def _await_end(self) -> None:
        """Wait until the container no longer runs, by inspecting it after each wait.

        The end of a wait proves nothing, because the engine may have been restarted; nor does a wait that continues,
        because a connection may be dropped silently.
        """
        n = 0
        while True:
            began = self._loop.time()
            try:
                if await self._has_ended():
                    break
            except EngineUnreachable:
                self._runner.note_failure()
            except NoSuchObject:
                if await self._is_gone():
                    self._seen = None
                    break
            except EngineError:
                pass
            n = n + 1 if self._loop.time() - began < SHORT_WAIT else 0
            if n > 1:
                await asyncio.sleep(jitter(backoff(n - 1, base=0.1, cap=2.0)))
        self._ended.set()
        self._log.output_seen.set()
        if self._on_end is not None:
            self._on_end()

    async def _has_ended(self) -> bool:
        """Inspect the container. If it runs, wait until it may have ended, and return False."""
        # Watched before it is inspected: an end after that is in the events.
        events = self._runner.events
        self._signal = signal = events.watch(self.id)
        try:
            self._seen = await self._engine.inspect(self.id)
            if not self._seen.runs:
                return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    await (self._engine.wait(self.id) if signal is None else signal.wait())
            return False
        finally:
            events.unwatch(self.id, signal)

    def _log_broke_off(self) -> None:
        """Inspect the container soon, as its log ended: the stream of events may be silent."""
        if self._signal is not None:
            self._signal.set()

    async def _is_gone(self) -> bool:
        """Return whether "not found" came from the engine that the container ran on."""
        try:
            await self._runner.engine_watch.verify(self._domain)
        except EngineUnreachable:
            return False
        return True

    async def frames(self, most: int) -> Sequence[Frame]:
        return await self._log.frames(most)

    # Commands

    async def send(self, command: Command) -> str:
        name = f"{time.time_ns():020d}-{os.urandom(4).hex()}"
        self._sent.add(name)
        user = await self._runner.users.user_of(self._seen)
        archive = Archive(user.uid, user.gid) if user else Archive(0, 0)
        # Readable by all: the supervisor may read the file before the engine has changed its owner.
        archive.file(name, encode_command(self._in_supervisor_time(command)), 0o644)
        try:
            await self._engine.put(self.id, f"{ATTEMPT}/cmd", archive.finish())
        except EngineError as error:  # Also if the supervisor obeyed and removed it before the engine was done.
            log.debug("a command to container %s was refused: %s", self.id[:12], error)
        return name

    def send_from_thread(self, command: Command) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: the worker exits.
            self._loop.call_soon_threadsafe(lambda: self._spawn(self._send_quietly(command)))

    async def _send_quietly(self, command: Command) -> None:
        with contextlib.suppress(EngineUnreachable):
            await self.send(command)

    def _on_event(self, event: dict[str, Any]) -> None:
        """Take the exit record from an event, and learn by how much the supervisor's clock is ahead, at least."""
        if event.get("event") == "exit":
            with contextlib.suppress(UnreadableRecord):  # Then the file is read instead.
                self._exit = decode(msgspec.json.encode(event.get("exit")), ExitRecord, f"`exit` of {self.id[:12]}")
        if self._ours or event.get("command") in self._sent:
            ahead = event["boottime"] / 1e6 - boottime()
            self._ahead = ahead if self._ahead is None else max(self._ahead, ahead)

    def _in_supervisor_time(self, command: Command) -> Command:
        """Convert a deadline to the supervisor's clock if known, else to the engine's; the result is never too late."""
        if command.stop_after is None:
            return command
        if self._ahead is not None:
            return msgspec.structs.replace(command, stop_after=command.stop_after + self._ahead, clock="boottime")
        stop_after = self._runner.engine_watch.clock.at(command.stop_after)
        return msgspec.structs.replace(command, stop_after=stop_after, clock="realtime")

    # The end

    async def collect(self) -> AttemptEnd | None:
        seen = self._seen
        if seen is None or (seen.status in BEING_REMOVED and self._exit is None):
            return _lost("its container was removed by someone other than holdfast")
        ended = await self._read_exit()
        if ended is None:
            if seen.out_of_memory:
                return AttemptEnd(cause=Cause.OUT_OF_MEMORY)
            return _lost(f"its supervisor left no exit record; the engine reports exit code {seen.exit_code}")
        if seen.exit_code not in (status_of(ended), *UNKNOWN):
            return _lost(f"its exit record says status {status_of(ended)}, its engine says {seen.exit_code}")
        killed = ended.signal == 9 or ended.code == 137
        if ended.cause is ExitCause.EXIT and killed and seen.out_of_memory:
            return AttemptEnd(cause=Cause.OUT_OF_MEMORY, exit_code=ended.code, signal=ended.signal)
        said = await self._bytes("service") if ended.cause is ExitCause.SERVICE_ENDED else None
        return to_end(ended, said or b"")

    async def _read_exit(self) -> ExitRecord | None:
        if self._exit is None:
            self._exit = await self._file("exit", ExitRecord)
        return self._exit

    async def _file(self, name: str, type: type[T]) -> T | None:
        """Read and decode a file that the supervisor wrote; None if it does not exist."""
        data = await self._bytes(name)
        return None if data is None else decode(data, type, f"{name} in {self.id[:12]}")

    async def _bytes(self, name: str) -> bytes | None:
        """Read a file of the attempt's folder; None if the same engine says that it does not exist."""
        if self._seen is None:
            return None
        path = f"{ATTEMPT}/{name}"
        try:
            async with contextlib.aclosing(self._engine.get(self.id, path)) as tar:
                return b"".join([chunk async for chunk in only_file(tar)])
        except NoSuchObject:
            await self._runner.engine_watch.verify(self._domain)
            return None

    async def outputs(self, collected: CollectedOutputs) -> None:
        if self._seen is not None:
            verify = partial(self._runner.engine_watch.verify, self._domain)
            await ContainerOutputs(self._engine, self.id, verify).collect(collected)

    async def secrets(self) -> Sequence[str]:
        data = await self._bytes("secrets")
        return () if data is None else decoding.decode(data, list[str])

    async def remove(self, *, had_other_owners: bool) -> None:
        """Remove container and volume. A late start would use the container's id, which is gone then."""
        self.close()
        if self._seen is not None:
            try:
                await self._runner.remover.remove(self.id)
            except NoSuchObject:
                pass
            except (EngineUnreachable, EngineError) as error:
                log.warning("cannot remove container %s, leaving it to the sweep: %s", self.id[:12], error)
                return
        await self._runner.workspaces.clear(self.identity)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()


def status_of(ended: ExitRecord) -> int:
    """Return the exit status of a supervisor that wrote this exit record."""
    if ended.cause in (ExitCause.TIMED_OUT, ExitCause.IDLE_TIMEOUT, ExitCause.STOP_AFTER):
        return ExitStatus.ENDED_LATE
    unstarted = ended.cause in (ExitCause.START_FAILED, ExitCause.SERVICE_ENDED, ExitCause.FAILED)
    if unstarted or (ended.code is None and ended.signal is None):
        return ExitStatus.ENDED_UNSTARTED
    return 128 + ended.signal if ended.signal is not None else ended.code or 0


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _lost(message: str) -> AttemptEnd:
    return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message=message))
