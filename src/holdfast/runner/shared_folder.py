"""The identity of the shared folder: a file with a random id, which the database records at the first start.

From then on a server or worker whose folder has no id, or another one, refuses to start: its files would be lost to the
others. An empty mount point looks like a new folder, so once an id is recorded, a folder without an id never gets one.
"""

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast import decoding
from holdfast.errors import ConfigError, SharedFolderUnavailable
from holdfast.model import RecordedFolder
from holdfast.permissions import PRIVATE, make_folder, make_parents, tighten

FILE = "holdfast-folder.json"
READS = 20
"""How often an incomplete file is read again: where links do not work, another process may still be writing it."""
ADOPT = "if this folder is to take its place, run `holdfast shared-folder adopt`"


class FolderId(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the id file. `installation` is the id of the database that the folder belongs to."""

    id: str
    installation: str


class FolderRecord(Protocol):
    """The shared folder that is recorded in a database."""

    async def read(self) -> RecordedFolder | None: ...

    async def write(self, recorded: RecordedFolder, *, instead_of: RecordedFolder | None) -> bool:
        """Record a folder. Return False if the record has changed meanwhile."""


class SharedFolder:
    """A shared folder that was verified when this process started."""

    def __init__(self, path: Path, folder_id: str) -> None:
        self.path = path
        self.id = folder_id

    def check(self) -> None:
        """Raise SharedFolderUnavailable if another folder, or an empty mount point, is there instead."""
        try:
            found = read_id(self.path)
        except OSError as error:
            raise SharedFolderUnavailable(f"the shared folder {self.path} cannot be read: {error.strerror}") from error
        if found is None or found.id != self.id:
            what = "has no id" if found is None else f"has the id {found.id}"
            raise SharedFolderUnavailable(
                f"the shared folder {self.path} {what}, and that of this installation has the id {self.id}: "
                "is it mounted? If it was replaced on purpose, by `holdfast shared-folder adopt`, restart this process"
            )


async def open_shared_folder(path: Path, installation: str, record: FolderRecord) -> SharedFolder:
    """Return the shared folder if it is the recorded one. At the first start, record it."""
    try:
        recorded = await record.read()
        if recorded is None:
            recorded = await _first_use(path, installation, record)
        found = read_id(path)
        if (problem := mismatch(path, installation, found, recorded)) is not None:
            raise ConfigError([problem])
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError([f"the shared folder {path} cannot be written to: is it mounted read-only?"])
        tighten(path, PRIVATE)
    except OSError as error:
        raise ConfigError([f"the shared folder {path} cannot be used: {error.strerror}"]) from error
    return SharedFolder(path, recorded.id)


async def adopt(path: Path, installation: str, record: FolderRecord) -> RecordedFolder:
    """Record this folder as the shared folder of the database, instead of any other.

    A folder of another installation gets a new id, so that the other installation notices.
    """
    try:
        found = read_id(path)
        if found is None:
            found = make_id(path, installation)
        elif found.installation != installation:
            found = FolderId(id=os.urandom(16).hex(), installation=installation)
            _replace(path / FILE, msgspec.json.encode(found))
    except OSError as error:
        raise ConfigError([f"the shared folder {path} cannot be used: {error.strerror}"]) from error
    recorded = RecordedFolder(id=found.id, path=str(path))
    while not await record.write(recorded, instead_of=await record.read()):
        pass  # Another process recorded a folder at the same time; the operator who runs this command decides.
    return recorded


def mismatch(path: Path, installation: str, found: FolderId | None, recorded: RecordedFolder | None) -> str | None:
    """Return why a folder cannot be the shared folder of a database, or None if it can."""
    if recorded is None:
        if found is None or found.installation == installation:
            return None
        return (
            f"{path} is the shared folder {found.id} of another installation, {found.installation}, and this database "
            f"({installation}) has none yet: set HOLDFAST_SHARED_DIR to a folder of its own, or {ADOPT}"
        )
    if found is not None and found.id == recorded.id:
        return None
    named = f"the shared folder of this database has the id {recorded.id} (it was at {recorded.path})"
    if found is None:
        return (
            f"{path} has no id of a shared folder, and {named}: is it mounted? "
            f"Mount it, or set HOLDFAST_SHARED_DIR to where it is; {ADOPT}"
        )
    return f"{path} has the id {found.id}, and {named}: set HOLDFAST_SHARED_DIR to where that one is; {ADOPT}"


def read_id(path: Path) -> FolderId | None:
    """Read the id of a folder; None if there is no id or no folder."""
    for _ in range(READS):
        try:
            return decoding.decode((path / FILE).read_bytes(), FolderId)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except msgspec.MsgspecError:
            time.sleep(0.05)  # Reason: it may be incomplete, and there is no event to wait for.
    raise OSError(errno.EINVAL, f"its {FILE} is damaged; restore it from a backup, or remove it and adopt the folder")


def make_id(path: Path, installation: str) -> FolderId:
    """Give a folder an id, unless another process is faster. Return the id that it has."""
    make_parents(path)
    make_folder(path)
    data = msgspec.json.encode(FolderId(id=os.urandom(16).hex(), installation=installation))
    temporary = _written(path / FILE, data)
    try:
        with contextlib.suppress(FileExistsError):
            _link(temporary, path / FILE, data)
    finally:
        temporary.unlink()
    found = read_id(path)
    if found is None:
        raise OSError(errno.ESTALE, "its id is gone again")
    return found


async def _first_use(path: Path, installation: str, record: FolderRecord) -> RecordedFolder:
    """Give the folder an id and record it. If two processes do so with different folders, one is refused."""
    found = read_id(path)
    if (problem := mismatch(path, installation, found, None)) is not None:
        raise ConfigError([problem])
    made = found is None
    found = found or make_id(path, installation)
    await record.write(RecordedFolder(id=found.id, path=str(path)), instead_of=None)
    recorded = await record.read()
    if recorded is None:
        raise ConfigError([f"the shared folder {path} could not be recorded in the database"])
    if (
        made and recorded.id != found.id
    ):  # Ours is not used: remove its id, so that the next start does not take it for another shared folder.
        (path / FILE).unlink(missing_ok=True)
    return recorded


def _link(source: Path, target: Path, data: bytes) -> None:
    """Create a file atomically unless it exists; on a filesystem without links, almost atomically."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _replace(target: Path, data: bytes) -> None:
    _written(target, data).rename(target)


def _written(target: Path, data: bytes) -> Path:
    """Write and sync a temporary file next to its target."""
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary
