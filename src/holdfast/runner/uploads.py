"""Uploads: files that callers give to jobs, in the shared folder.

    uploads/<tenant>/<upload>/…     uploaded files, which may be given to jobs for a day
    inputs/<job>/<upload>/…         the files of a job: links to the same files, kept until the job is removed

An upload never changes: it is received under another name and renamed when complete. The inputs of a job are named by
their upload, so giving one is idempotent, also after a crash.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from holdfast.errors import Conflict, Invalid, NotFound, TooLarge
from holdfast.model import new_id
from holdfast.permissions import make_file, make_folder
from holdfast.runner.collected_outputs import ArtifactLimits, ContractViolation, checked_name
from holdfast.runner.tree_removal import remove_tree

NAMED = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
STAGED = 10
"""A tenant may have this many times the maximum size of one upload waiting."""


class IncomingUpload:
    """One upload that is being received."""

    def __init__(self, target: Path, limits: ArtifactLimits) -> None:
        self.id = target.name
        self.files: dict[str, int] = {}
        self._target = target
        self._limits = limits
        self._temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
        self._name = ""
        self._open: IO[bytes] | None = None

    def begin(self, name: str) -> None:
        try:
            self._name = checked_name(name)
            if len(self.files) >= self._limits.entries:
                raise TooLarge("file", f"over {self._limits.entries} files in one upload")
            path = self._temporary / name
            make_folder(path.parent)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except ContractViolation as error:
            raise Invalid("file", str(error)) from error
        except OSError as error:
            if error.errno not in NAMED:
                raise
            raise Invalid("file", f"{name[:200]!r} exists already, as a file or a folder") from error
        self._open = os.fdopen(descriptor, "wb")
        self.files[name] = 0

    def write(self, data: bytes) -> None:
        assert self._open is not None
        self.files[self._name] += len(data)
        if sum(self.files.values()) > self._limits.bytes:
            raise TooLarge("file", f"over {self._limits.bytes} bytes in one upload")
        self._open.write(data)

    def end(self) -> None:
        assert self._open is not None
        self._open.flush()
        os.fsync(self._open.fileno())
        self._open.close()
        self._open = None

    def publish(self) -> None:
        self._temporary.rename(self._target)

    def discard(self) -> None:
        if self._open is not None:
            self._open.close()
        remove_tree(self._temporary)


class JobUploads:
    def __init__(self, shared: Path) -> None:
        self._uploads = shared / "uploads"
        self._given = shared / "inputs"

    def receive(self, tenant: str, limits: ArtifactLimits) -> IncomingUpload:
        """Begin an upload, unless too much is staged already."""
        folder = self._of(tenant)
        if sum(path.stat().st_size for path in _files(folder).values()) > STAGED * limits.bytes:
            raise Conflict(f"upload quota of {STAGED * limits.bytes} bytes exceeded; unused uploads expire after 24 h")
        return IncomingUpload(folder / new_id(), limits)

    def give(self, tenant: str, job_id: str, uploads: Sequence[str], limit: int) -> None:
        """Link uploads of this tenant for a job that is about to be submitted."""
        found: dict[str, Path] = {}
        for upload in uploads:
            files = _files(self._of(tenant) / _known(upload))
            if not files:
                raise NotFound("upload", upload[:60])
            if both := found.keys() & files.keys():
                raise Invalid("uploads", f"two uploads have a file {min(both)}")
            found |= files
        if sum(path.stat().st_size for path in found.values()) > limit:
            raise TooLarge("uploads", f"over {limit} bytes for one job")
        for upload in uploads:
            self._link(self._of(tenant) / upload, self._given / str(uuid.UUID(job_id)) / upload)

    def given(self, job_id: str, uploads: Sequence[str]) -> Mapping[str, Path]:
        """Return the input files of a job by name. Raise NotFound if an upload is missing."""
        found: dict[str, Path] = {}
        for upload in uploads:
            files = _files(self._given / job_id / _known(upload))
            if not files:
                raise NotFound("upload", upload[:60])
            found |= files
        return found

    def _link(self, source: Path, target: Path) -> None:
        if target.exists():
            os.utime(target.parent)  # It may be old, and about to be swept.
            return
        temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
        try:
            make_folder(target.parent)
            shutil.copytree(source, temporary, copy_function=_link_or_copy)
            temporary.rename(target)
        except FileNotFoundError:
            raise NotFound("upload", source.name) from None  # Its day was over in this moment.
        except OSError:
            if not target.exists():
                raise
        finally:
            remove_tree(temporary)

    def _of(self, tenant: str) -> Path:
        return self._uploads / hashlib.sha256(tenant.encode()).hexdigest()[:32]

    # Sweeping

    def expire(self, older: float) -> int:
        """Remove uploads older than `older` seconds, including incomplete ones; return how many."""
        gone = 0
        for tenant in _entries(self._uploads):
            for entry in _entries(tenant):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > older:
                        remove_tree(entry)
                        gone += 1
        return gone

    def jobs(self, *, after: str, limit: int, older: float) -> Sequence[str]:
        """Return jobs with inputs older than `older` seconds, sorted, after `after`."""
        now = time.time()
        old = []
        for entry in _entries(self._given):
            with contextlib.suppress(FileNotFoundError):
                if entry.name > after and now - entry.stat().st_mtime > older:
                    old.append(entry.name)
        return sorted(old)[:limit]

    def remove(self, job_id: str) -> None:
        remove_tree(self._given / job_id)


def _known(upload: str) -> str:
    """Return an upload's id if it is a UUID, which is safe as a file name; else raise NotFound."""
    try:
        if str(uuid.UUID(upload)) == upload:
            return upload
    except ValueError:
        pass
    raise NotFound("upload", upload[:60])


def _files(folder: Path) -> dict[str, Path]:
    """Return all files below a folder by name; none if it does not exist or is still being received."""
    return {str(path.relative_to(folder)): path for path in _walk(folder)}


def _walk(folder: Path) -> Iterator[Path]:
    for entry in _entries(folder):
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry)
        elif entry.is_file():
            yield entry


def _entries(folder: Path) -> Sequence[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # A filesystem without links, or with too many of them.
        make_file(Path(target))
        shutil.copyfile(source, target)
