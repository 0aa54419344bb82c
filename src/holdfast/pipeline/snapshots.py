"""The folders of all snapshots, in the shared folder. A folder is never incomplete.

`copy` makes one: copied under a temporary name, synced and compared with its source, renamed, and the rename synced.
Only then may its row be written; a snapshot exists if a row names its folder. The tasks' `output/` is stored next to
it, in a folder of the same name with the suffix `.outputs`. Folders without a row, and what a crash left incomplete,
are swept. Names are never reused, so no process removes another one's folder.
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

from holdfast.errors import SharedFolderUnavailable, SnapshotDamaged, SnapshotFailed
from holdfast.model import Outputs
from holdfast.permissions import make_folder
from holdfast.pipeline.copying import (
    CopyFailed,
    Strategy,
    copy_folder,
    kind_of,
    map_full_disk,
    opened,
    probe,
    sync_filesystem,
    sync_folder,
)
from holdfast.pipeline.identity import hash_fields
from holdfast.pipeline.outputs import ContentDiffers, copy_outputs
from holdfast.runner.collected_outputs import CollectedOutputs
from holdfast.runner.ownership import PLAIN, take_over

SNAPSHOTS = "snapshots"
TEMPORARY = ".tmp"
DATA = "data"
OUTPUTS = ".outputs"
"""The suffix of the outputs folder of a snapshot."""
TREE = "holdfast tree 1"
GRACE = 3600.0
"""Folders younger than this may belong to a builder that has not written its row yet."""
GONE = (errno.ENOENT, errno.ENOTDIR)
FORBIDDEN = (errno.EACCES, errno.EPERM)
READ_ADVICE = {
    **dict.fromkeys(FORBIDDEN, "be the owner of its files, or root"),
    **dict.fromkeys((*GONE, errno.ESTALE, errno.EIO, errno.ENOTCONN), "is HOLDFAST_SHARED_DIR mounted here?"),
}
"""Advice for a snapshot that cannot be read although it is not damaged."""
COPY_ADVICE = "the worker must be able to read what tasks leave, and to write to HOLDFAST_SHARED_DIR"

StepHook = Callable[[str], None]
"""Called before each step of a copy or a removal, so that tests can crash there."""


class CopiedFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A synced folder that has no row yet. `digest` is what `verify` compares."""

    folder: str
    size: int
    digest: str


class TreeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of every entry of a folder; contents are not read.

    `shape` must be equal in a copy and its source; `digest` adds owners and times, which do not change unless somebody
    modifies the folder.
    """

    size: int
    shape: str
    digest: str


class WorkspaceChanged(Exception):
    """A workspace changed while it was copied: it was not quiet."""


class SnapshotFolders:
    def __init__(self, root: Path, *, at: StepHook | None = None, check: Callable[[], None] | None = None) -> None:
        self.root = root
        self._check = check or (lambda: None)
        self._at = at or (lambda step: None)

    @classmethod
    def below(cls, shared: Path) -> "SnapshotFolders":
        """The folders of this installation."""
        return cls(shared / SNAPSHOTS)

    @property
    def strategy(self) -> Strategy:
        """How copies are made on this filesystem."""
        self._ready()
        return probe(self.root)

    def copy(self, snapshot: str, workspace: Path, outputs: Path | None = None) -> CopiedFolder:
        """Copy a quiet workspace to a new folder. Raise CacheFull on a full disk, SnapshotFailed on other errors.

        Neither leaves anything on the disk. `outputs` are files below the same root, which are moved next to the copy.
        """
        with _map_copy_errors(workspace), map_full_disk(self.root / snapshot):
            self._ready()
            name = f"{snapshot}.{secrets.token_hex(8)}"
            with self.temporary(name) as path:
                self._at("copy")
                copied = path / DATA
                copy_folder(workspace, copied, to_disk=True)
                take_over(copied)
                self._at("sync")
                with ThreadPoolExecutor(1) as beside:
                    synced = beside.submit(sync_filesystem, copied)
                    before, made = summarise(workspace), summarise(copied)
                synced.result()
                if before.shape != made.shape:
                    raise WorkspaceChanged(f"{workspace} changed while it was copied")
                self._at("rename")
                copied.rename(self.root / name)
                if outputs is not None:
                    self._at("move outputs")
                    outputs.rename(self.outputs_of(name))
                self._at("sync parent")
                sync_folder(self.root)
        self._at("row")
        return CopiedFolder(folder=name, size=made.size, digest=made.digest)

    def needs(self, workspace: Path) -> int:
        """Return the size of a copy of a workspace. Raise SnapshotFailed if it cannot be read, like the copy itself."""
        with _map_copy_errors(workspace):
            return summarise(workspace).size

    def verify(self, folder: str, digest: str) -> bool:
        """Return whether a folder is unchanged since it was published.

        Raise SnapshotFailed if we cannot read it, or if the root is missing too: other hosts may still read it.
        """
        try:
            return summarise(self.root / folder).digest == digest
        except OSError as error:
            if error.errno in GONE and self.root.is_dir():
                return False
            raise self._not_read(folder, error) from error

    def restore(self, folder: str, digest: str, workspace: Path) -> None:
        """Restore a folder into a new workspace. Raise SnapshotDamaged if it changed since it was published."""
        if not self.verify(folder, digest):
            raise SnapshotDamaged(f"snapshot folder {folder} has changed since it was published")
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

    def outputs_of(self, folder: str) -> Path:
        """Return the folder of a snapshot's outputs; it does not exist if there are none."""
        return self.root / f"{folder}{OUTPUTS}"

    def outputs_complete(self, folder: str, outputs: Outputs) -> bool:
        """Return whether all files of a manifest exist with their sizes. Raise SnapshotFailed on read errors."""
        path = self.outputs_of(folder)
        try:
            return all(os.lstat(path / file.path).st_size == file.size for file in outputs.files)
        except OSError as error:
            if error.errno in GONE and self.root.is_dir():
                return False
            raise self._not_read(path.name, error) from error

    def collect_outputs(self, folder: str, outputs: Outputs, collected: CollectedOutputs) -> None:
        """Copy the outputs of a snapshot, comparing the contents with the manifest."""
        path = self.outputs_of(folder)
        try:
            copy_outputs(path, outputs, collected)
        except ContentDiffers as error:
            raise SnapshotDamaged(f"snapshot folder {folder}: {error}") from error
        except OSError as error:
            if error.filename is None or not Path(str(error.filename)).is_relative_to(path):
                raise  # The target of the copy failed, not the snapshot.
            if error.errno in GONE and self.root.is_dir():
                raise SnapshotDamaged(f"snapshot folder {folder} has lost {error.filename}") from error
            raise self._not_read(path.name, error) from error

    def remove(self, folder: str) -> None:
        """Remove a folder whose row is gone or was never written. After a crash, the sweep removes the rest."""
        self._at("remove")
        name = Path(folder).name
        shutil.rmtree(self.root / name, ignore_errors=True)
        shutil.rmtree(self.outputs_of(name), ignore_errors=True)

    def names(self) -> list[str]:
        """Return every folder that was published, or that has outputs."""
        if not self.root.is_dir():
            return []
        names = (entry.name for entry in os.scandir(self.root) if not entry.name.startswith("."))
        return sorted({name.removesuffix(OUTPUTS) for name in names})

    def sweep(self, stored: Collection[str], *, grace: float = GRACE) -> int:
        """Remove folders that no row names, and leftovers of dead builders; return how many."""
        before = time.time() - grace
        removed = 0
        for name in self.names():
            paths = [path for path in (self.root / name, self.outputs_of(name)) if path.exists()]
            if name not in stored and all(_older(path, before) for path in paths):
                for path in paths:
                    shutil.rmtree(path, ignore_errors=True)
                removed += 1
        temporary = self.root / TEMPORARY
        for name in sorted(os.listdir(temporary)) if temporary.is_dir() else ():
            if _older(temporary / name, before) and _abandoned(temporary / name):
                shutil.rmtree(temporary / name, ignore_errors=True)
                removed += 1
        return removed

    def _not_read(self, folder: str, error: OSError) -> SnapshotFailed:
        """Return the error for an unreadable snapshot. The advice comes before the path: long messages are cut."""
        reason = f"{os.strerror(error.errno or errno.EIO)}, {READ_ADVICE.get(error.errno or 0, 'try again')}"
        return SnapshotFailed(f"a snapshot cannot be read here: {reason} ({self.root / folder})")

    def _ready(self) -> None:
        try:
            self._check()
        except SharedFolderUnavailable as error:
            raise SnapshotFailed(f"a snapshot cannot be made: {error.message}") from error
        make_folder(self.root / TEMPORARY)

    @contextmanager
    def temporary(self, name: str) -> Iterator[Path]:
        """Open a temporary folder that is locked while we live and removed after the block."""
        path = self.root / TEMPORARY / name
        with _map_copy_errors(path), map_full_disk(path):
            self._ready()
            path.mkdir(mode=0o700)
        try:
            with opened(path) as handle:
                fcntl.flock(handle, fcntl.LOCK_EX)
                yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _map_copy_errors(workspace: Path) -> Iterator[None]:
    """Map an error of a copy to SnapshotFailed: the reason, then the path inside the workspace."""
    try:
        yield
    except OSError as error:
        about = error.strerror if isinstance(error, CopyFailed) else error.filename
        reason = os.strerror(error.errno or errno.EIO)
        remedy = f", {COPY_ADVICE}" if error.errno in FORBIDDEN else ""
        where = str(about or workspace).strip().splitlines()[-1].replace(f"{workspace}/", "")
        raise SnapshotFailed(f"a snapshot cannot be made: {reason}{remedy} ({where})") from error


def summarise(folder: Path) -> TreeSummary:
    """Summarise every entry below a folder, sorted by name."""
    size, shape, whole = 0, [TREE], [TREE]
    for path, entry in _entries(folder, ""):
        kind = kind_of(entry.st_mode)
        link = os.readlink(folder / path) if kind == "l" else ""
        length = entry.st_size if kind == "f" else 0
        size += length
        fields = [os.fsencode(path).hex(), kind, oct(entry.st_mode), str(length), link]
        shape += [*fields[:2], oct(entry.st_mode & PLAIN), *fields[3:]]
        whole += [*fields, str(entry.st_uid), str(entry.st_gid), str(entry.st_mtime_ns) if kind == "f" else ""]
    return TreeSummary(size=size, shape=hash_fields(shape), digest=hash_fields(whole))


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


def _abandoned(path: Path) -> bool:
    """Return whether the builder of a temporary folder is dead. If locks do not work, judge by the folder's age."""
    try:
        with opened(path) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
