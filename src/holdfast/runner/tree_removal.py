"""Removes a folder tree that a child may have made arbitrarily deep."""

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

MAX_DEPTH = 64
"""Folders below this depth are moved up before they are removed."""
MOST_ROUNDS = 1000


def remove_tree(root: Path) -> None:
    """Remove a folder tree of any depth. Entries that cannot be removed stay; that is not an error.

    Folders may be nested deeper than the limits of paths or of Python's recursion: the deepest ones are moved up before
    they are removed. If the path is a link or a file, that is removed.
    """
    for _ in range(MOST_ROUNDS):
        with contextlib.suppress(RecursionError):
            shutil.rmtree(root, ignore_errors=True)
        if root.is_symlink() or not root.is_dir():
            with contextlib.suppress(OSError):
                root.unlink()
            return
        if not _flatten(root):
            return


def remove_or_explain(folder: Path) -> str | None:
    """Remove a folder tree. Return why something is left, or None."""
    remove_tree(folder)
    return _why_left(folder) if os.path.lexists(folder) else None


def _why_left(root: Path) -> str | None:
    """Remove as much of a tree as possible. Return the first reason why something stays, or None."""
    for parent, folders, files in os.walk(root, topdown=False):
        for name, drop in (*((name, os.unlink) for name in files), *((name, _remove_entry) for name in folders)):
            try:
                drop(os.path.join(parent, name))
            except OSError as error:
                return f"{os.path.join(parent, name)}: {error.strerror}"
    try:
        _remove_entry(root)
    except OSError as error:
        return f"{root}: {error.strerror}"
    return None


def _remove_entry(path: str | Path) -> None:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTDIR:
            raise
        os.unlink(path)


def _flatten(root: Path) -> bool:
    """Move deeply nested folders to the top of a tree. Return whether there were any."""
    moved = False
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        for name in os.listdir(fd):
            moved |= _lift(fd, name)
    except OSError:
        return False
    finally:
        os.close(fd)
    return moved


def _lift(root: int, name: str) -> bool:
    """Descend along the first folder of each level, and move what is below MAX_DEPTH to the top."""
    here = os.dup(root)
    try:
        for _ in range(MAX_DEPTH):
            try:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            except OSError:
                return False
            os.close(here)
            here = inner
            below = [entry for entry in os.listdir(here) if _is_folder(here, entry)]
            if not below:
                return False
            name = below[0]
        os.rename(name, f"lifted-{os.urandom(8).hex()}", src_dir_fd=here, dst_dir_fd=root)
        return True
    finally:
        os.close(here)


def _is_folder(folder: int, name: str) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
