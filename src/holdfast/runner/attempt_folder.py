"""The attempt folder: a worker and a supervisor communicate only through the files in it.

    lock       held by the supervisor while it lives       spec       what to run
    started    there before the child's program runs       cmd/       commands to the supervisor
    log        frames of output and events                 exit       how it ended; written last

The files give the state of the attempt. `alive()` and no `exit`: running. `exit`: ended. Neither, but `started`: the
supervisor died, and its processes are gone or leftovers. None of them: nothing ran.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast import decoding
from holdfast.errors import Conflict, HoldfastError
from holdfast.limits import AttemptLimits
from holdfast.permissions import make_folder, make_passable
from holdfast.runner import supervisor
from holdfast.runner.frames import FrameReader, Stream
from holdfast.runner.leftovers import PATIENCE, Session, find_leftovers, kill_leftovers
from holdfast.runner.supervisor.protocol import SPARE_BYTES, SPARES, VERSION, ExitCause
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.wire import Command, SupervisorSpec, encode_command, encode_spec

T = TypeVar("T")
SERVICE_TAIL = 4096
"""Bytes of a service's output that are read, from its end."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a full disk, and of a full quota."""
FORBIDDEN = b'{"version":1,"forbidden":true}\n'
"""Content of `started` as a start marker: nothing ran, and nothing may start."""


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
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


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
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


class UnreadableRecord(HoldfastError):
    """A file of the supervisor that this version cannot read: it is newer, or damaged."""

    code = "unreadable"


class AttemptFolder:
    """One attempt's folder on this host."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def create(self) -> None:
        """Make the folder if it does not exist, accessible only to its owner."""
        if not self.path.is_dir():
            make_passable(self.path)
        make_folder(self.path / "cmd")

    def write_spec(self, spec: SupervisorSpec) -> None:
        self._write_atomically("spec", encode_spec(spec))

    def write_secrets(self, values: Iterable[str]) -> None:
        """Keep the secrets that the child was given, to mask its output later."""
        self._write_atomically("secrets", encode_secrets(values))

    def write_limits(self, limits: AttemptLimits) -> None:
        """Keep the limits of the attempt for an adopter: the settings may have changed by then."""
        self._write_atomically("limits", msgspec.json.encode(limits))

    def limits(self) -> AttemptLimits:
        """Return the limits of the attempt; none if an older version started it."""
        try:
            return decoding.decode((self.path / "limits").read_bytes(), AttemptLimits)
        except FileNotFoundError:
            return AttemptLimits()

    def secrets(self) -> Sequence[str]:
        try:
            return decoding.decode((self.path / "secrets").read_bytes(), list[str])
        except FileNotFoundError:
            return ()

    def start(self) -> int:
        """Start a supervisor and return its pid; the caller reaps it. It exits at once if another one was first."""
        program = str(supervisor.path())
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        return os.posix_spawn(program, [program, str(self.path)], {}, file_actions=quiet)

    def alive(self) -> bool:
        """Return whether a supervisor holds the lock; the kernel releases it when the supervisor dies."""
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

    def started(self) -> StartRecord | None:
        return None if self.forbidden() else self._read("started", StartRecord)

    def forbidden(self) -> bool:
        """Return whether there is a start marker that prevents every start."""
        try:
            return (self.path / "started").read_bytes() == FORBIDDEN
        except FileNotFoundError:
            return False

    def forbid(self) -> bool:
        """Write a start marker, so that nothing starts here. Return False if a supervisor is there or was."""
        self.create()
        fd = self._open_lock()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self.forbidden():
                if any((self.path / name).exists() for name in ("started", "exit")):
                    return False
                self._write_even_if_full("started", FORBIDDEN)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    def _open_lock(self) -> int:
        """Open the lock, which may be new. A disk without a free inode gets one back from a reserved file."""
        for n in reversed(range(SPARES)):
            try:
                return os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                (self.path / f"spare.{n}").unlink(missing_ok=True)
        return os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def reduce_to_marker(self) -> None:
        """Remove everything except the start marker, so that a late supervisor does not start the attempt again."""
        if not (self.path / "started").exists() and not (self.path / "exit").exists():
            self.forbid()
        marker = "started" if (self.path / "started").exists() else "exit"
        with contextlib.suppress(FileNotFoundError):
            found = [entry for entry in os.scandir(self.path) if entry.name not in (marker, "lock")]
            # `spec` goes last: without it the folder counts as reduced; an interrupted call is repeated.
            for entry in sorted(found, key=lambda entry: entry.name == "spec"):
                if entry.is_dir(follow_symlinks=False):
                    remove_tree(Path(entry.path))
                else:
                    Path(entry.path).unlink(missing_ok=True)  # Another process may be removing it too.

    def exit(self) -> ExitRecord | None:
        return self._read("exit", ExitRecord)

    def left_nothing(self) -> bool:
        """Return whether the child left neither a report nor anything in its output folder."""
        work = self.path / "work"
        try:
            return not os.path.lexists(work / "result.json") and not os.listdir(work / "output")
        except OSError:
            return False  # The child changed its folders; collecting the outputs reports the problem.

    def service(self) -> bytes:
        """Return the last output of the service; nothing if there was none."""
        try:
            with (self.path / "service").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - SERVICE_TAIL))
                return file.read(SERVICE_TAIL)
        except FileNotFoundError:
            return b""

    def frames(self, *, stdout: int = 0, stderr: int = 0, events: int = 0) -> FrameReader:
        """Return a reader of the log from these offsets on."""
        return FrameReader(self.path / "log", stdout=stdout, stderr=stderr, events=events)

    def write_spares(self) -> None:
        """Reserve disk blocks for a few commands or a start marker: they must be written even on a full disk."""
        for n in range(SPARES):
            write_new(f"{self.path}/spare.{n}", bytes(SPARE_BYTES))

    def send(self, command: Command) -> str:
        """Send a command to the supervisor and return its name, which the acknowledgement carries."""
        name = f"{time.time_ns():020d}-{os.urandom(4).hex()}"
        self._write_even_if_full(f"cmd/{name}", encode_command(command))
        return name

    def _write_even_if_full(self, name: str, data: bytes) -> None:
        """Write a small file, on a full disk into a reserved block."""
        try:
            self._write_atomically(name, data)
        except OSError as error:
            if error.errno not in FULL or not self._write_into_spare(name, data):
                raise

    def _write_into_spare(self, name: str, data: bytes) -> bool:
        """Write a small file into a reserved block. Return False if all are used."""
        for n in range(SPARES):
            spare = self.path / f"spare.{n}"
            with contextlib.suppress(OSError):
                with open(os.open(spare, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb", 0) as file:
                    file.write(data)
                    file.truncate()
                spare.rename(self.path / name)
                return True
        return False

    def acks(self, *, events: int = 0) -> Sequence[Ack]:
        """Return the supervisor's answers from this offset of its events on."""
        reader = self.frames(stdout=1 << 62, stderr=1 << 62, events=events)
        found: list[Ack] = []
        while frames := reader.read():
            events_only = (frame.event for frame in frames if frame.stream is Stream.EVENTS)
            found += [decoding.convert(event, Ack) for event in events_only if event.get("event") == "ack"]
        return found

    def leftovers(self, mark: str, uid: int | None = None) -> list[int]:
        """Return the pids of processes that a dead supervisor left, for people to look at."""
        started = self.started()
        return find_leftovers(mark, started.session if started else None, uid)

    def kill_leftovers(self, mark: str, uid: int | None = None, *, patience: float = PATIENCE) -> list[int]:
        """Kill the processes that a dead supervisor left; return the pids of survivors. Blocks up to `patience`.

        `uid` is the attempt's own user, if it has one.
        """
        if self.alive():
            raise Conflict(f"{self.path} has a running supervisor: send it a command instead")
        started = self.started()
        return kill_leftovers(mark, started.session if started else None, uid, patience=patience)

    def _write_atomically(self, name: str, data: bytes) -> None:
        """Write a file under another name and rename it, so that nobody reads it half-written."""
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
    """Write a new file, accessible only to its owner. On a disk that is nearly full a write may be short."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", 0) as file:
        written = file.write(data)
        while written < len(data):
            written += file.write(data[written:])


def encode_secrets(values: Iterable[str]) -> bytes:
    """Encode the content of `secrets`."""
    return msgspec.json.encode(sorted(values))


def decode(data: bytes, type: type[T], where: str) -> T:
    """Read a file that a supervisor wrote."""
    try:
        # The supervisor passes names on as they are, UTF-8 or not.
        found = msgspec.json.decode(data.decode("utf-8", "replace"))
        if found["version"] != VERSION:
            raise UnreadableRecord(f"{where} has version {found['version']}; this holdfast reads {VERSION}")
        return decoding.convert(found, type)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise UnreadableRecord(f"{where} cannot be read: {error}") from error
