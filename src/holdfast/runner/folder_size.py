"""How much room a folder takes on its disk: walked by descriptor, following no link, with a bound on the work.

What its owner removes or moves meanwhile is not an error. Files that were removed and are still open are not seen.
"""

import contextlib
import os
import stat
from pathlib import Path

LEAST = 512
"""What an entry counts at least: an empty file takes an inode."""
MOST_DEPTH = 256
"""A folder that is nested deeper counts as too large: each that is open on the way needs a descriptor, and what is not
looked at could be of any size."""


class _Enough(Exception):
    """The rest need not be looked at."""


class _Walk:
    def __init__(self, most: int) -> None:
        self._most = most
        self._linked: set[tuple[int, int]] = set()
        self.total = 0

    def add(self, about: os.stat_result) -> None:
        """Count an entry once, also a file with several names."""
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
    """Return the bytes that a folder takes; once it is more than `most`, the rest is not counted."""
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
