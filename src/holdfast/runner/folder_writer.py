"""Writes a set of files into a temporary folder next to its target, and publishes them with one rename."""

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from holdfast.permissions import make_folder
from holdfast.runner.tree_removal import remove_tree


class FolderWriter:
    """The temporary folder is made with the first entry, after `check`, which raises if nothing may be written.

    `sync`: a file is durable once it is closed.
    """

    def __init__(self, target: Path, *, check: Callable[[], None] | None = None, sync: bool = False) -> None:
        self.target = target
        self.staging = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
        self._check = check
        self._sync = sync

    def folder(self, name: str) -> None:
        make_folder(self._path_for(name))

    def create(self, name: str) -> IO[bytes]:
        path = self._path_for(name)
        try:
            make_folder(path.parent)
        except NotADirectoryError as error:
            raise FileExistsError(error.errno, error.strerror, name) from error
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return io.BufferedWriter(_SyncedFile(fd, "wb")) if self._sync else open(fd, "wb")

    def has(self, name: str) -> bool:
        path = self.staging / name
        folders = [folder for folder in path.parents if folder.is_relative_to(self.staging)]
        return os.path.lexists(path) or any(folder.is_file() for folder in folders)

    def open(self, name: str) -> IO[bytes] | None:
        path = self.staging / name
        return path.open("rb") if path.is_file() else None

    def drop(self, name: str) -> int:
        path = self.staging / name
        size = path.stat().st_size
        path.unlink()
        with contextlib.suppress(OSError):
            for folder in path.parents:
                if folder == self.staging:
                    break
                folder.rmdir()
        return size

    def publish(self) -> None:
        """Move everything to its final folder with one rename. One that exists is ours, from before a crash."""
        remove_tree(self.target)
        self.staging.rename(self.target)

    def discard(self) -> None:
        remove_tree(self.staging)

    def _path_for(self, name: str) -> Path:
        if self._check is not None:
            self._check()
            self._check = None
        return self.staging / name


class _SyncedFile(io.FileIO):
    def close(self) -> None:
        if not self.closed:
            os.fsync(self.fileno())
        super().close()
