"""The identity of the shared folder: a file with a random id in it, which the database records at the first start.

From then on a part whose folder has no id, or another one, refuses to start: its files would be where nobody looks for
them. An empty mount point looks like a new folder, so a folder without an id is never made one once an id is recorded.
"""

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast import decoding
from holdfast.errors import ConfigError, SharedFolderAway
from holdfast.model import RecordedFolder
from holdfast.permissions import PRIVATE, make_folder, make_parents, tighten

FILE = "holdfast-folder.json"
READS = 20
"""How often a file is read that is not whole: another process may be writing it where links do not work."""
ADOPT = "if this folder is to take its place, run `holdfast shared-folder adopt`"


class FolderId(msgspec.Struct, frozen=True, kw_only=True):
    """What a shared folder says of itself. `installation` is the id of the database that it belongs to."""

    id: str
    installation: str


class FolderRecord(Protocol):
    """What a database knows of its shared folder."""

    async def read(self) -> RecordedFolder | None: ...

    async def write(self, recorded: RecordedFolder, *, instead_of: RecordedFolder | None) -> bool:
        """Record a folder; False if the record is no longer what it was."""


class SharedFolder:
    """A shared folder that was proven when this process started."""

    def __init__(self, path: Path, folder_id: str) -> None:
        self.path = path
        self.id = folder_id

    def check(self) -> None:
        """Refuse to use the folder while another one, or an empty mount point, is in its place."""
        try:
            found = read_id(self.path)
        except OSError as error:
            raise SharedFolderAway(f"the shared folder {self.path} cannot be read: {error.strerror}") from error
        if found is None or found.id != self.id:
            what = "has no id" if found is None else f"has the id {found.id}"
            raise SharedFolderAway(
                f"the shared folder {self.path} {what}, and that of this installation has the id {self.id}: "
                "is it mounted? If it was replaced on purpose, by `holdfast shared-folder adopt`, restart this process"
            )


async def open_shared_folder(path: Path, installation: str, record: FolderRecord) -> SharedFolder:
    """Return the shared folder if it is the one that the database names. At the first start it becomes that one."""
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
    """Make this folder the one that the database names, whatever it named before.

    A folder of another installation gets a new id, so that the other one notices.
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
        pass  # Another process recorded one in this moment: the person who runs this command has the last word.
    return recorded


def mismatch(path: Path, installation: str, found: FolderId | None, recorded: RecordedFolder | None) -> str | None:
    """Say why a folder is not the one that a database names; None if it is, or can become that one."""
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
    """Read a folder's id; None if there is none, or no folder."""
    for _ in range(READS):
        try:
            return decoding.decode((path / FILE).read_bytes(), FolderId)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except msgspec.MsgspecError:
            time.sleep(0.05)  # Reason: it may be half written, and there is nothing to wait for.
    raise OSError(errno.EINVAL, f"its {FILE} is damaged; restore it from a backup, or remove it and adopt the folder")


def make_id(path: Path, installation: str) -> FolderId:
    """Give a folder an id, unless another process is faster; return the one that it has then."""
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
    """Give the folder an id and record it. Of two that do so at once with different folders, one is refused."""
    found = read_id(path)
    if (problem := mismatch(path, installation, found, None)) is not None:
        raise ConfigError([problem])
    made = found is None
    found = found or make_id(path, installation)
    await record.write(RecordedFolder(id=found.id, path=str(path)), instead_of=None)
    recorded = await record.read()
    if recorded is None:
        raise ConfigError([f"the shared folder {path} could not be recorded in the database"])
    if made and recorded.id != found.id:  # Ours never was one: the next start must not take it for another's.
        (path / FILE).unlink(missing_ok=True)
    return recorded


def _link(source: Path, target: Path, data: bytes) -> None:
    """Put a file in its place whole, if none is there; on a filesystem without links, nearly so."""
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
    """Write a file beside its target, to the disk."""
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary
