"""Start markers that are made in advance: an attempt without a folder must be forbidden on a full disk too.

A start marker (`AttemptFolder.forbid`) keeps a slow previous owner from starting an attempt whose job is cancelled or
requeued. Its folder needs blocks; one that exists already only has to be renamed.
"""

import contextlib
import errno
import os
from pathlib import Path

from holdfast.permissions import make_folder
from holdfast.runner.attempt_folder import FULL, AttemptFolder
from holdfast.runner.tree_removal import remove_tree

SPARES = 8


class SpareMarkers:
    """Folders with a start marker, on the disk of the attempts."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def refill(self) -> None:
        """Make those that are missing; on a full disk, none."""
        with contextlib.suppress(OSError):
            make_folder(self.root)
            for n in range(SPARES):
                if not (self.root / str(n)).exists():
                    self._make(self.root / str(n))

    def forbid(self, folder: AttemptFolder) -> bool:
        """Write a start marker, so that nothing starts there. Return False if a supervisor is there or was."""
        if not folder.path.exists() and self._place(folder.path):
            return True
        return folder.forbid()

    def _place(self, target: Path) -> bool:
        """Put a folder with a start marker where there is none. Return False if another process was faster."""
        try:
            return self._make(target)
        except OSError as error:
            if error.errno not in FULL:
                raise
            for n in range(SPARES):
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self.root / str(n))  # A start marker is kept for some time after this one.
                    return _renamed(self.root / str(n), target)
            raise

    def _make(self, target: Path) -> bool:
        """Make a folder with a start marker under another name, and rename it into place."""
        temporary = AttemptFolder(target.with_name(f".{target.name}.{os.urandom(4).hex()}"))
        try:
            make_folder(temporary.path)
            temporary.forbid()
            return _renamed(temporary.path, target)
        finally:
            remove_tree(temporary.path)


def _renamed(path: Path, target: Path) -> bool:
    try:
        path.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True
