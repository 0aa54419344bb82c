"""The folders of all snapshots, in the shared folder. Each is whole or not there.

`copy` makes one: copied under a temporary name, brought to the disk and compared with its source, renamed, the rename
brought to the disk. Only then may its row be written; the row names the folder, and decides. A folder that no row names
is swept, as is what a crash left half-way. Names are never used twice, so nobody removes another one's folder.
"""

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast.errors import SharedFolderAway, SnapshotDamaged, SnapshotFailed
from holdfast.pipeline.copying import (
    CopyFailed,
    Strategy,
    copy_folder,
    full_disk_named,
    kind_of,
    opened,
    probe,
    sync_filesystem,
    sync_folder,
)
from holdfast.pipeline.identity import framed

SNAPSHOTS = "snapshots"
TEMPORARY = ".tmp"
DATA = "data"
TREE = "holdfast tree 1"
GRACE = 3600.0
"""Folders younger than this may be a builder's that has not written its row yet."""
GONE = (errno.ENOENT, errno.ENOTDIR)
FORBIDDEN = (errno.EACCES, errno.EPERM)
NOT_READ = {
    **dict.fromkeys(FORBIDDEN, "be the owner of its files, or root"),
    **dict.fromkeys((*GONE, errno.ESTALE, errno.EIO, errno.ENOTCONN), "is HOLDFAST_SHARED_DIR mounted here?"),
}
"""The way out, where a snapshot is not damaged and yet cannot be read."""
NOT_MADE = "the worker must be able to read what tasks leave, and to write to HOLDFAST_SHARED_DIR"

At = Callable[[str], None]
"""Told before each step of a copy or a removal, so that tests can die there."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that is on the disk and waits for its row. `digest` is what `verify` compares."""

    folder: str
    size: int
    digest: str


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """A folder as a look at every entry tells it; contents are not read.

    `shape` is what a copy must share with its source; `digest` adds owners and times, which stay as long as nobody
    touches the folder.
    """

    size: int
    shape: str
    digest: str


class Changed(Exception):
    """A workspace changed while it was copied: whatever makes it quiet did not."""


class Folders:
    def __init__(self, root: Path, *, at: At | None = None, check: Callable[[], None] | None = None) -> None:
        self.root = root
        self._check = check or (lambda: None)
        self._at = at or (lambda step: None)

    @classmethod
    def below(cls, shared: Path) -> "Folders":
        """The folders of this installation."""
        return cls(shared / SNAPSHOTS)

    @property
    def strategy(self) -> Strategy:
        """How copies are made here."""
        self._ready()
        return probe(self.root)

    def copy(self, snapshot: str, workspace: Path) -> Made:
        """Copy a quiet workspace to a folder of its own. A full disk is CacheFull, other trouble SnapshotFailed.

        Neither leaves anything.
        """
        with _trouble_named(workspace), full_disk_named(self.root / snapshot):
            self._ready()
            name = f"{snapshot}.{secrets.token_hex(8)}"
            with self._temporary(name) as place:
                self._at("copy")
                copied = place / DATA
                copy_folder(workspace, copied, to_disk=True)
                self._at("sync")
                with ThreadPoolExecutor(1) as beside:
                    synced = beside.submit(sync_filesystem, copied)
                    before, made = look(workspace), look(copied)
                synced.result()
                if before.shape != made.shape:
                    raise Changed(f"{workspace} changed while it was copied")
                self._at("rename")
                copied.rename(self.root / name)
                self._at("sync parent")
                sync_folder(self.root)
        self._at("row")
        return Made(folder=name, size=made.size, digest=made.digest)

    def needs(self, workspace: Path) -> int:
        """How many bytes a copy of a workspace takes; what cannot be read is SnapshotFailed, as in the copy itself."""
        with _trouble_named(workspace):
            return look(workspace).size

    def verify(self, folder: str, digest: str) -> bool:
        """Whether a folder is still what was published.

        One that we cannot look at is not damaged for others: SnapshotFailed. Neither is one whose root is missing, too.
        """
        try:
            return look(self.root / folder).digest == digest
        except OSError as error:
            if error.errno in GONE and self.root.is_dir():
                return False
            raise self._not_read(folder, error) from error

    def restore(self, folder: str, digest: str, workspace: Path) -> None:
        """Fill a workspace that is not there yet. A folder that is not what was published is refused."""
        if not self.verify(folder, digest):
            raise SnapshotDamaged(f"snapshot folder {folder} is not what was published")
        failed: OSError | None = None
        try:
            copy_folder(self.root / folder, workspace)
        except OSError as error:
            failed = error
        whole = self.verify(folder, digest)
        if whole and failed is None:
            return
        shutil.rmtree(workspace, ignore_errors=True)
        if failed is None or not whole:
            raise SnapshotDamaged(f"snapshot folder {folder} was removed while it was copied")
        raise self._not_read(folder, failed) from failed

    def remove(self, folder: str) -> None:
        """Remove a folder whose row is gone, or was never written. What stays after a crash is swept."""
        self._at("remove")
        shutil.rmtree(self.root / Path(folder).name, ignore_errors=True)

    def names(self) -> list[str]:
        """Every folder that was published."""
        if not self.root.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.root) if not entry.name.startswith("."))

    def sweep(self, standing: Collection[str], *, grace: float = GRACE) -> int:
        """Remove folders that no row names and what dead builders left; return how many went."""
        before = time.time() - grace
        gone = 0
        for name in self.names():
            if name not in standing and _older(self.root / name, before):
                shutil.rmtree(self.root / name, ignore_errors=True)
                gone += 1
        temporary = self.root / TEMPORARY
        for name in sorted(os.listdir(temporary)) if temporary.is_dir() else ():
            if _older(temporary / name, before) and _abandoned(temporary / name):
                shutil.rmtree(temporary / name, ignore_errors=True)
                gone += 1
        return gone

    def _not_read(self, folder: str, error: OSError) -> SnapshotFailed:
        """Why a snapshot cannot be read here. The way out stands before the path: there may be no room for all."""
        reason = f"{os.strerror(error.errno or errno.EIO)}, {NOT_READ.get(error.errno or 0, 'try again')}"
        return SnapshotFailed(f"a snapshot cannot be read here: {reason} ({self.root / folder})")

    def _ready(self) -> None:
        try:
            self._check()
        except SharedFolderAway as error:
            raise SnapshotFailed(f"a snapshot cannot be made: {error.message}") from error
        (self.root / TEMPORARY).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _temporary(self, name: str) -> Iterator[Path]:
        """A temporary folder that is locked as long as we live, and does not outlast the block."""
        place = self.root / TEMPORARY / name
        place.mkdir(mode=0o700)
        try:
            with opened(place) as handle:
                fcntl.flock(handle, fcntl.LOCK_EX)
                yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _trouble_named(workspace: Path) -> Iterator[None]:
    """Say why a workspace could not be copied. Paths are told from the workspace on, behind the reason."""
    try:
        yield
    except OSError as error:
        about = error.strerror if isinstance(error, CopyFailed) else error.filename
        reason = os.strerror(error.errno or errno.EIO)
        way_out = f", {NOT_MADE}" if error.errno in FORBIDDEN else ""
        where = str(about or workspace).strip().splitlines()[-1].replace(f"{workspace}/", "")
        raise SnapshotFailed(f"a snapshot cannot be made: {reason}{way_out} ({where})") from error


def look(folder: Path) -> Tree:
    """Look at every entry below a folder, in the order of their names."""
    size, shape, whole = 0, [TREE], [TREE]
    for path, entry in _entries(folder, ""):
        kind = kind_of(entry.st_mode)
        link = os.readlink(folder / path) if kind == "l" else ""
        length = entry.st_size if kind == "f" else 0
        size += length
        fields = [os.fsencode(path).hex(), kind, oct(entry.st_mode), str(length), link]
        shape += fields
        whole += [*fields, str(entry.st_uid), str(entry.st_gid), str(entry.st_mtime_ns) if kind == "f" else ""]
    return Tree(size=size, shape=framed(shape), digest=framed(whole))


def _entries(folder: Path, below: str) -> Iterator[tuple[str, os.stat_result]]:
    if not below:
        yield "", os.lstat(folder)
    for name in sorted(os.listdir(folder / below)):
        path = f"{below}/{name}" if below else name
        entry = os.lstat(folder / path)
        yield path, entry
        if kind_of(entry.st_mode) == "d":
            yield from _entries(folder, path)


def _older(path: Path, before: float) -> bool:
    try:
        return os.lstat(path).st_ctime < before
    except OSError:
        return False


def _abandoned(place: Path) -> bool:
    """Whether the builder that made a temporary folder is dead. Where locks do not work, its age has to do."""
    try:
        with opened(place) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
