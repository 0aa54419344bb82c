"""The artifact store in the shared folder.

    artifacts/<job>/<attempt>.<token>/…   published outputs; `.<attempt>.<token>.…` while they are being collected
    uploads/<tenant>/<upload>/…           uploaded files; the tenant's name is hashed
    inputs/<job>/<upload>/…               the files of a job: links to those of the upload

Every set of files is written under another name and renamed when it is complete, so it never changes. The inputs of a
job are named by their upload, so linking them is idempotent, also after a crash.
"""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from holdfast.errors import DiskFull, NotFound
from holdfast.permissions import make_file, make_folder
from holdfast.runner.artifacts import Artifact, FileWriter, InputFile, OpenArtifact, StoredOutputs, outputs_name
from holdfast.runner.collected_outputs import ContractViolation, checked_name
from holdfast.runner.folder_writer import FolderWriter
from holdfast.runner.output_sources import open_regular
from holdfast.runner.tree_removal import remove_or_explain, remove_tree

MEASURE_SECONDS = 1.0
"""How long a measurement of the free space is valid: it costs a system call, and a network disk may be slow."""


class FolderArtifacts:
    """`check` raises if another folder, or none, is mounted; `shortage` says why nothing new may be stored."""

    def __init__(
        self,
        shared: Path,
        *,
        check: Callable[[], None] | None = None,
        shortage: Callable[[], str | None] | None = None,
    ) -> None:
        self._artifacts = shared / "artifacts"
        self._uploads = shared / "uploads"
        self._inputs = shared / "inputs"
        self._check = check or (lambda: None)
        self._shortage = shortage or (lambda: None)
        self._measured = float("-inf")
        self._short: str | None = None

    def check_room(self) -> None:
        if time.monotonic() - self._measured >= MEASURE_SECONDS:
            self._short = self._shortage()
            self._measured = time.monotonic()
        if self._short is not None:
            raise DiskFull(self._short)

    # Outputs of attempts

    def folder(self, job_id: str, attempt: int, token: int) -> Path:
        """Return the folder of published outputs."""
        return self._artifacts / job_id / outputs_name(attempt, token)

    def writer(self, job_id: str, attempt: int, token: int) -> FileWriter:
        return FolderWriter(self.folder(job_id, attempt, token), check=self._check_writable)

    def list(self, job_id: str, attempt: int, token: int) -> Sequence[Artifact]:
        self._check()
        files = _files(self.folder(job_id, attempt, token))
        return [Artifact(path=name, size=_size(entry)) for name, entry in files]

    def open(self, job_id: str, attempt: int, token: int, path: str, *, start: int = 0) -> OpenArtifact:
        """Open one artifact. Every folder on the path is opened separately, and no link is followed."""
        self._check()
        try:
            content = _open_below(self.folder(job_id, attempt, token), checked_name(path).split("/"))
        except (ContractViolation, OSError):
            raise NotFound("artifact", path) from None
        content.seek(start)
        return OpenArtifact(size=os.fstat(content.fileno()).st_size, content=content)

    def jobs(self, after: str, limit: int) -> Sequence[str]:
        return sorted(entry.name for entry in _entries(self._artifacts) if entry.name > after)[:limit]

    def stored(self, job_id: str) -> Sequence[StoredOutputs]:
        now, found = time.time(), []
        for entry in sorted(_entries(self._artifacts / job_id), key=_name):
            with contextlib.suppress(FileNotFoundError):
                found.append(StoredOutputs(name=entry.name, age=now - _modified(entry)))
        return found

    def remove(self, job_id: str, name: str | None = None) -> None:
        remove_tree(self._artifacts / job_id / name if name else self._artifacts / job_id)

    # Uploads

    def upload_writer(self, tenant: str, upload: str) -> FileWriter:
        return FolderWriter(self._of(tenant) / upload, check=self._check_writable, sync=True)

    def uploaded(self, tenant: str, upload: str) -> Mapping[str, int]:
        self._check()
        return {name: _size(entry) for name, entry in _files(self._of(tenant) / upload)}

    def staged_bytes(self, tenant: str) -> int:
        self._check()
        return sum(_size(entry) for _, entry in _files(self._of(tenant)))

    def expire_uploads(self, older: float) -> int:
        gone, now = 0, time.time()
        for tenant in _entries(self._uploads):
            for entry in _entries(tenant):
                with contextlib.suppress(FileNotFoundError):
                    if now - _modified(entry) > older:
                        remove_tree(Path(entry.path))
                        gone += 1
        return gone

    # Inputs of jobs

    def link_upload(self, tenant: str, upload: str, job_id: str) -> None:
        self._check()
        source, target = self._of(tenant) / upload, self._inputs / job_id / upload
        if target.exists():
            os.utime(target.parent)  # It may be old, and about to be swept.
            return
        temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
        try:
            make_folder(target.parent)
            shutil.copytree(source, temporary, copy_function=_link_or_copy)
            temporary.rename(target)
        except OSError:
            if target.exists():
                return  # Another request linked the same upload.
            if not source.exists():
                raise NotFound("upload", upload) from None  # Its day was over in this moment.
            raise
        finally:
            remove_tree(temporary)

    def inputs(self, job_id: str, upload: str) -> Mapping[str, InputFile]:
        self._check()
        files = _files(self._inputs / job_id / upload)
        return {name: InputFile(size=_size(entry), open=_opener(entry.path)) for name, entry in files}

    def jobs_with_inputs(self, *, after: str, limit: int, older: float) -> Sequence[str]:
        old, now = [], time.time()
        for entry in _entries(self._inputs):
            with contextlib.suppress(FileNotFoundError):
                if entry.name > after and now - _modified(entry) > older:
                    old.append(entry.name)
        return sorted(old)[:limit]

    def remove_inputs(self, job_id: str) -> None:
        remove_tree(self._inputs / job_id)

    # Deleted jobs

    def delete_job(self, job_id: str) -> str | None:
        self._check()  # An empty mount point would look as if the files were gone.
        problems = [remove_or_explain(top / job_id) for top in (self._artifacts, self._inputs)]
        return next(filter(None, problems), None)

    def _check_writable(self) -> None:
        self._check()
        if (why := self._shortage()) is not None:
            raise DiskFull(why)

    def _of(self, tenant: str) -> Path:
        return self._uploads / hashlib.sha256(tenant.encode()).hexdigest()[:32]


def _open_below(folder: Path, parts: Sequence[str]) -> IO[bytes]:
    """Open a regular file below a folder, one path component after the other."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = inner
        return open_regular(parts[-1], fd)
    finally:
        os.close(fd)


def _files(folder: Path | str, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the regular files below a folder with their paths, sorted; none if the folder does not exist."""
    for entry in sorted(_entries(folder), key=_name):
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path, f"{prefix}{entry.name}/")
        elif entry.is_file(follow_symlinks=False):
            yield f"{prefix}{entry.name}", entry


def _entries(folder: Path | str | os.DirEntry[str]) -> Sequence[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _opener(path: str) -> Callable[[], IO[bytes]]:
    return lambda: open(path, "rb")


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _size(entry: os.DirEntry[str]) -> int:
    return entry.stat(follow_symlinks=False).st_size


def _modified(entry: os.DirEntry[str]) -> float:
    return entry.stat(follow_symlinks=False).st_mtime


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # A filesystem without links, or with too many of them.
        make_file(Path(target))
        shutil.copyfile(source, target)
