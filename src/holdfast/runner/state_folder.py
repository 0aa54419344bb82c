"""The state folder: holdfast's files on the local disk of this host, and the id of the host.

host                         a random id; machine ids are cloned with images
boots                        every boot of this host that ran attempts, the latest last
workers/INSTALLATION/…lock   locked by a worker while it lives; if it can be locked, the worker is dead
attempts/INSTALLATION/…      the attempt folders of one installation
spare-markers/INSTALLATION/  start markers made in advance, for a full disk
spare-folders/INSTALLATION/  folders of ended attempts, emptied, which later attempts use again
spaces/INSTALLATION/…        the workspaces of pipelines in containers
turns/ENGINE/…               start slots: locked while a container starts on that engine
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.permissions import FILE, make_folder, make_passable, tighten, write_file
from holdfast.runner.leftovers import boot_id

BOOTS = 50
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "fuse.sshfs"})
"""Filesystems on which a lock may outlive its process, or be released when another host dies."""


ATTEMPT_FILES = ("log", "started", "exit", "lock", "service")


class StateFolder:
    """The state folder of this host. It is created if it does not exist."""

    def __init__(self, path: Path, boot: str | None = None) -> None:
        self.path = path
        self.boot = boot or boot_id()
        try:
            make_passable(path)
            make_passable(path / "attempts")
            make_folder(path / "workers")
            self.host = _first(path / "host", os.urandom(8).hex)
            self._boots = _note_boot(path / "boots", self.boot)
        except OSError as error:
            raise ConfigError([f"the state folder {path} cannot be used: {error.strerror}"]) from error
        kind = _filesystem(path)
        if kind in NETWORK:
            raise ConfigError(
                [f"the state folder {path} is on {kind}: set HOLDFAST_STATE_DIR to a folder on a local disk"]
            )

    @property
    def domain(self) -> str:
        """The domain of attempts that start now: this folder, during this boot."""
        return f"host:{self.host}:{self.boot}"

    @property
    def domains(self) -> Sequence[str]:
        """The domains of all boots of this host: only here can attempts of earlier boots be examined."""
        return [f"host:{self.host}:{boot}" for boot in reversed(self._boots)]

    def attempts(self, installation: str) -> Path:
        folder = self.path / "attempts" / installation
        make_passable(folder)
        _tighten_attempts(folder)
        return folder

    def spare_markers(self, installation: str) -> Path:
        return self.path / "spare-markers" / installation

    def spare_folders(self, installation: str) -> Path:
        """Return the folder for those of ended attempts, which are used again. On a full disk it may not exist."""
        folder = self.path / "spare-folders" / installation
        with contextlib.suppress(OSError):
            make_folder(folder)
        return folder.resolve()

    def locks(self, installation: str) -> "WorkerLocks":
        folder = self.path / "workers" / installation
        make_folder(folder)
        return WorkerLocks(folder)


class WorkerLock:
    """The lock file of this worker. With `keep_file` it stays after a clean exit."""

    keep_file = False


class WorkerLocks:
    """The lock files of one installation's workers on this host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def acquire(self, worker: str) -> Iterator["WorkerLock"]:
        """Lock a worker's file while it lives. The kernel releases the lock when the worker dies.

        A clean exit removes the file. If leases are left, the file stays, so that another worker hands them over.
        """
        path = self._file(worker)
        fd = _locked(path)
        lock = WorkerLock()
        try:
            yield lock
            if not lock.keep_file:
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def others(self, worker: str) -> list[str]:
        """Return the workers, other than this one, whose lock files are here."""
        names = [entry.name.removesuffix(".lock") for entry in os.scandir(self._folder)]
        return sorted(name for name in names if name != self._file(worker).name.removesuffix(".lock"))

    @contextlib.contextmanager
    def taken_from_dead(self, worker: str) -> Iterator[bool]:
        """Take the lock of a dead worker during the block, then remove the file. Yield whether the worker is dead."""
        path = self._file(worker)
        fd = -1
        try:
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                path.unlink(missing_ok=True)
                return
            yield False
        finally:
            if fd >= 0:
                os.close(fd)

    def _file(self, worker: str) -> Path:
        return self._folder / f"{worker.replace('/', '_')}.lock"


def _locked(path: Path) -> int:
    """Create a file and lock it. Repeat if a search for dead workers removed the file in between."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)


def _first(path: Path, make: Callable[[], str]) -> str:
    """Return the text of a file that the first process writes atomically."""
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        write_file(temporary, make().encode())
        try:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            temporary.unlink()
    tighten(path, FILE)
    return path.read_text().strip()


def _tighten_attempts(folder: Path) -> None:
    """Tighten the permissions of files that an older version created."""
    for name in ATTEMPT_FILES:
        for file in folder.glob(f"*/{name}"):
            with contextlib.suppress(FileNotFoundError):
                tighten(file, FILE)


def _note_boot(path: Path, boot: str) -> list[str]:
    """Add this boot to the list, under a lock, and return the list."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        boots = file.read().split()
        if boot not in boots:
            boots = [*boots, boot][-BOOTS:]
            file.seek(0)
            file.truncate()
            file.write("\n".join(boots) + "\n")
            file.flush()
            os.fsync(file.fileno())
        elif boots[-1] != boot:
            boots.remove(boot)
            boots.append(boot)
        return boots


def _filesystem(path: Path) -> str:
    """Return the type of the filesystem of a folder."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown"
