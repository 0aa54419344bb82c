"""The attempt folder: all that a worker and a supervisor say to each other is a file in it.

    lock       held by the supervisor while it lives       spec       what to run
    started    there before the child's program runs       cmd/       words to the supervisor
    log        frames of output and events                 exit       how it ended; written last

Whoever finds a folder reads the attempt from it: `alive()` and no `exit`: running. `exit`: ended. Neither, but
`started`: the supervisor died, and what it ran is gone or a leftover. None of them: nothing ran.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.errors import Conflict, HoldfastError
from holdfast.runner import supervisor
from holdfast.runner.frames import FrameReader, Stream
from holdfast.runner.leftovers import PATIENCE, Session, find_leftovers, kill_leftovers
from holdfast.runner.outputs import remove_tree
from holdfast.runner.spec import Command, Spec, encode_command, encode_spec

T = TypeVar("T")
VERSION = 1
LAST_SAID = 4096
FORBIDDEN = b'{"version":1,"forbidden":true}\n'
"""What stands in `started` where nothing ran and nothing may."""


class ExitCause(StrEnum):
    """Why an attempt ended, in the supervisor's words."""

    EXIT = "exit"
    TIMED_OUT = "timed_out"
    IDLE_TIMEOUT = "idle_timeout"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    STOP_AFTER = "stop_after"
    START_FAILED = "start_failed"
    OUT_OF_MEMORY = "out_of_memory"
    SERVICE_ENDED = "service_ended"
    FAILED = "failed"


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor wrote before the first program ran. The pids are for people; they are never signalled."""

    version: int
    token: int
    mark: str
    boot_id: str
    supervisor_pid: int
    supervisor_start_ticks: int
    supervisor_session: int
    child_pid: int
    child_start_ticks: int
    child_session: int
    started_at: int
    boottime: int

    @property
    def session(self) -> Session:
        return Session(boot_id=self.boot_id, leader=self.child_session, start_ticks=self.child_start_ticks)


class TaskExit(msgspec.Struct, frozen=True, kw_only=True):
    """How one task ended."""

    name: str
    cause: ExitCause
    started_at: int
    ended_at: int
    code: int | None = None
    signal: int | None = None


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How the attempt ended. Times are microseconds. `token` is the highest that the supervisor had seen."""

    version: int
    token: int
    cause: ExitCause
    reason: str
    stopped_by: str
    killed: bool
    text: str
    mark: str
    boot_id: str
    started_at: int
    ended_at: int
    lasted: int
    oom_kills: int
    log_length: int
    stdout_length: int
    stderr_length: int
    stdout_dropped: int
    stderr_dropped: int
    log_lost: int
    log_error: str
    copy_lost: int
    user_time: int
    system_time: int
    max_rss: int
    tasks: tuple[TaskExit, ...]
    code: int | None = None
    signal: int | None = None


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's answer to a command."""

    command: str
    verb: str
    ok: bool
    token: int
    highest_token: int
    why: str
    reason: str
    boottime: int
    stop_after: int | None = None


class Unreadable(HoldfastError):
    """A file of the supervisor that this version cannot read: newer, or damaged."""

    code = "unreadable"


class Folder:
    """One attempt's folder on this host."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Make the folder, for its owner alone; one that is there stays as it is."""
        (self.path / "cmd").mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o711)

    def write_spec(self, spec: Spec) -> None:
        self._place("spec", encode_spec(spec))

    def write_secrets(self, values: Iterable[str]) -> None:
        """Keep what the child was given, for whoever masks its output later."""
        self._place("secrets", msgspec.json.encode(sorted(values)))

    def secrets(self) -> Sequence[str]:
        try:
            return msgspec.json.decode((self.path / "secrets").read_bytes(), type=list[str])
        except FileNotFoundError:
            return ()

    def start(self) -> int:
        """Start a supervisor and return its pid; the caller reaps it. It leaves at once if another one was first."""
        program = str(supervisor.path())
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        return os.posix_spawn(program, [program, str(self.path)], {}, file_actions=quiet)

    def alive(self) -> bool:
        """Say whether a supervisor holds the lock; the kernel drops it at any death."""
        try:
            fd = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def started(self) -> Started | None:
        return None if self.forbidden() else self._read("started", Started)

    def forbidden(self) -> bool:
        """Say whether somebody left the mark that keeps every supervisor from starting here."""
        try:
            return (self.path / "started").read_bytes() == FORBIDDEN
        except FileNotFoundError:
            return False

    def forbid(self) -> bool:
        """See to it that nothing starts here any more; False if something has, or is about to."""
        self.create()
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self.forbidden():
                if any((self.path / name).exists() for name in ("started", "exit")):
                    return False
                self._place("started", FORBIDDEN)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    def bury(self) -> None:
        """Remove all but the mark that keeps a supervisor that comes late from starting it again."""
        if not (self.path / "started").exists() and not (self.path / "exit").exists():
            self.forbid()
        mark = "started" if (self.path / "started").exists() else "exit"
        with contextlib.suppress(FileNotFoundError):
            found = [entry for entry in os.scandir(self.path) if entry.name not in (mark, "lock")]
            # Without its spec it counts as buried: whoever dies in the middle leaves it to the next one.
            for entry in sorted(found, key=lambda entry: entry.name == "spec"):
                if entry.is_dir(follow_symlinks=False):
                    remove_tree(Path(entry.path))
                else:
                    Path(entry.path).unlink(missing_ok=True)  # Somebody else may be at it too.

    def exit(self) -> Exit | None:
        return self._read("exit", Exit)

    def left_nothing(self) -> bool:
        """Say whether the child left neither a report nor anything in its output folder."""
        work = self.path / "work"
        try:
            return not os.path.lexists(work / "result.json") and not os.listdir(work / "output")
        except OSError:
            return False  # Whatever it did to its folders: that is for whoever takes what is in them.

    def service(self) -> bytes:
        """Return what the service said last; nothing if there was none."""
        try:
            with (self.path / "service").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_SAID))
                return file.read(LAST_SAID)
        except FileNotFoundError:
            return b""

    def frames(self, *, stdout: int = 0, stderr: int = 0, events: int = 0) -> FrameReader:
        """Return a reader of the log from these offsets on."""
        return FrameReader(self.path / "log", stdout=stdout, stderr=stderr, events=events)

    def send(self, command: Command) -> str:
        """Leave a command for the supervisor and return its name, by which it is acknowledged."""
        name = f"{time.time_ns():020d}-{os.urandom(4).hex()}"
        self._place(f"cmd/{name}", encode_command(command))
        return name

    def acks(self, *, events: int = 0) -> Sequence[Ack]:
        """Return the supervisor's answers from this offset of its events on."""
        reader = self.frames(stdout=1 << 62, stderr=1 << 62, events=events)
        found: list[Ack] = []
        while frames := reader.read():
            events_only = (frame.event for frame in frames if frame.stream is Stream.EVENTS)
            found += [msgspec.convert(event, Ack) for event in events_only if event.get("event") == "ack"]
        return found

    def leftovers(self, mark: str) -> list[int]:
        """Return the pids of what a dead supervisor left behind, for people to look at."""
        started = self.started()
        return find_leftovers(mark, started.session if started else None)

    def kill_leftovers(self, mark: str, *, patience: float = PATIENCE) -> list[int]:
        """Kill what a dead supervisor left behind; return the pids of what could not be. Blocks up to `patience`."""
        if self.alive():
            raise Conflict(f"{self.path} has a living supervisor: send it a command instead")
        started = self.started()
        return kill_leftovers(mark, started.session if started else None, patience=patience)

    def _place(self, name: str, data: bytes) -> None:
        """Write a file under another name and rename it: nobody sees half of it."""
        target = self.path / name
        temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
        try:
            write_new(temporary, data)
            temporary.rename(target)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _read(self, name: str, type: type[T]) -> T | None:
        try:
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        return decode(data, type, str(self.path / name))


def write_new(path: str | Path, data: bytes) -> None:
    """Write a file that is not there yet, for its owner alone."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", 0) as file:
        file.write(data)


def decode(data: bytes, type: type[T], where: str) -> T:
    """Read a file that a supervisor wrote."""
    try:
        # The supervisor passes names on as they are, UTF-8 or not.
        found = msgspec.json.decode(data.decode("utf-8", "replace"))
        if found["version"] != VERSION:
            raise Unreadable(f"{where} has version {found['version']}; this holdfast reads {VERSION}")
        return msgspec.convert(found, type)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise Unreadable(f"{where} cannot be read: {error}") from error
