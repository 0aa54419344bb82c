"""The artifacts of all attempts, in the shared folder: list, open, remove.

The folder of an attempt is named by attempt and token. Only the one that is recorded with the end of the job is ever
shown. How outputs are collected is in `collected_outputs.py` and `output_sources.py`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from holdfast.errors import NotFound
from holdfast.runner.collected_outputs import ArtifactLimits, CollectedOutputs, ContractViolation, checked_name
from holdfast.runner.output_sources import open_regular
from holdfast.runner.tree_removal import remove_tree


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size: int


class ArtifactStore:
    """The artifacts of all attempts. `check` runs before the first write; it raises without the shared folder."""

    def __init__(self, shared: Path, *, check: Callable[[], None] | None = None) -> None:
        self.root = shared / "artifacts"
        self._check = check

    def folder(self, job_id: str, attempt: int, token: int) -> Path:
        return self.root / job_id / f"{attempt}.{token}"

    def collection(self, job_id: str, attempt: int, token: int, limits: ArtifactLimits) -> CollectedOutputs:
        return CollectedOutputs(self.folder(job_id, attempt, token), limits, self._check)

    def list(self, job_id: str, attempt: int, token: int) -> Sequence[Artifact]:
        """Return the artifacts of one attempt, sorted by path."""
        return list(self._files(self.folder(job_id, attempt, token)))

    def open(self, job_id: str, attempt: int, token: int, path: str) -> IO[bytes]:
        """Open one artifact for reading. Every folder on the path is opened separately, and no link is followed."""
        try:
            parts = checked_name(path).split("/")
            fd = os.open(self.folder(job_id, attempt, token), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for part in parts[:-1]:
                    inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                    os.close(fd)
                    fd = inner
                return open_regular(parts[-1], fd)
            finally:
                os.close(fd)
        except (ContractViolation, OSError):
            raise NotFound("artifact", path) from None

    def jobs(self, after: str, limit: int) -> Sequence[str]:
        """Return the jobs that have a folder here, sorted, after `after`."""
        try:
            names = sorted(name for name in os.listdir(self.root) if name > after)
        except FileNotFoundError:
            return ()
        return names[:limit]

    def attempts(self, job_id: str) -> Sequence[str]:
        """Return the names of a job's folders, including unpublished ones."""
        try:
            return sorted(os.listdir(self.root / job_id))
        except FileNotFoundError:
            return ()

    def age(self, job_id: str, name: str, now: float) -> float:
        try:
            return now - (self.root / job_id / name).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def remove(self, job_id: str, name: str | None = None) -> None:
        """Remove one folder of a job, or all of them."""
        remove_tree(self.root / job_id / name if name else self.root / job_id)

    def _files(self, folder: Path, prefix: str = "") -> Iterator[Artifact]:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._files(Path(entry.path), f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                yield Artifact(path=f"{prefix}{entry.name}", size=entry.stat(follow_symlinks=False).st_size)
