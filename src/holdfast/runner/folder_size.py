"""Measures how much disk space a folder uses: by descriptors, without following links, with a limit on the work.

Entries that are removed or moved meanwhile are not an error. Removed files that are still open are not counted.
"""

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

LEAST = 512
"""Minimum bytes counted per entry: an empty file still uses an inode."""
MOST_DEPTH = 256
"""A folder that is nested deeper counts as too large: each level needs an open descriptor, and the rest could have
any size."""


class _Enough(Exception):
    """The limit is exceeded; the rest need not be measured."""


class _Walk:
    def __init__(self, most: int) -> None:
        self._most = most
        self._linked: set[tuple[int, int]] = set()
        self.total = 0

    def add(self, about: os.stat_result) -> None:
        """Count an entry. A file with several names is counted once."""
        if about.st_nlink > 1 and not stat.S_ISDIR(about.st_mode):
            if (about.st_dev, about.st_ino) in self._linked:
                return
            self._linked.add((about.st_dev, about.st_ino))
        self.total += max(about.st_blocks * 512, LEAST)
        if self.total > self._most:
            raise _Enough

    def enter(self, folder: int, device: int, depth: int) -> None:
        if depth > MOST_DEPTH:
            self.total = self._most + 1
            raise _Enough
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    about = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
                    self.add(about)
                    if stat.S_ISDIR(about.st_mode) and about.st_dev == device:
                        self._below(entry.name, folder, device, depth)

    def _below(self, name: str, folder: int, device: int, depth: int) -> None:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            self.enter(inner, device, depth + 1)
        finally:
            os.close(inner)


def folder_size(path: Path, most: int) -> int:
    """Return the bytes that a folder uses, counted until they exceed `most`."""
    walk = _Walk(most)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        walk.enter(fd, os.fstat(fd).st_dev, 0)
    except (_Enough, OSError):
        pass
    finally:
        os.close(fd)
    return walk.total


def size_of_existing(folders: Sequence[Path], most: int) -> int | None:
    """Return the total size of those folders that exist on this host; None if none does."""
    here = [path for path in folders if path.is_absolute() and path.is_dir()]
    return sum(folder_size(path, most) for path in here) if here else None
