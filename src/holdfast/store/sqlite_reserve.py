"""Disk space that is reserved for a SQLite file, so that commits still work on a disk that a job has filled.

Three parts, all of them made while there is space:

    FILE-wal   blocks beyond its end: SQLite appends commits there without asking the filesystem for more
    FILE       free pages: new rows do not make the file grow, so the log can be checkpointed and start again
    FILE-room  blocks that are released when the file cannot be opened for lack of space: opening needs a few

The reserve lasts for some thousands of small commits. Unlike free space, it cannot be used by others.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FULL = "database or disk is full"
LOG_BYTES = 16 * 1024 * 1024
"""What one block of the WAL index covers; a longer log would need more space for its index."""
OPEN_BYTES = 1024 * 1024
FEWEST_PAGES, PAGES = 512, 1024
"""Free pages are made when fewer than the first number are left; the second is how many are made at once."""
KEEP_SIZE = 1


def free_pages(connection: Any) -> int:
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


def add_pages(connection: Any) -> None:
    """Grow the file by pages with content: only those have blocks on the disk. `drop_pages` frees them."""
    size = int(connection.execute("PRAGMA page_size").fetchone()[0])
    connection.execute("CREATE TABLE IF NOT EXISTS room_to_free (filler BLOB)")  # Another process may be at it too.
    connection.execute("INSERT INTO room_to_free VALUES (zeroblob(?))", (PAGES * size,))


def drop_pages(connection: Any) -> None:
    """Free the pages of `add_pages`, also those of a process that died before it; must be another transaction."""
    connection.execute("DROP TABLE IF EXISTS room_to_free")


def set_blocks_aside(path: Path) -> None:
    """Reserve blocks for the log and for the next opening; where the filesystem cannot, nothing is reserved.

    This never opens the database file itself: closing it in this process would drop SQLite's locks on it.
    """
    _reserve(_log_of(path), LOG_BYTES, create=False)
    _reserve(_room_of(path), OPEN_BYTES, create=True)


def release_room(path: Path) -> bool:
    """Release the space that was reserved for opening the file; return False if there was none."""
    try:
        _room_of(path).unlink()
    except OSError:
        return False
    return True


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _room_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-room")


def _reserve(path: Path, size: int, *, create: bool) -> None:
    """Reserve blocks of a file up to this size; its length and content stay as they are."""
    with contextlib.suppress(OSError):
        if path.stat().st_blocks * 512 >= size:
            return
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    with contextlib.suppress(OSError):
        fd = os.open(path, flags, 0o600)
        try:
            if _fallocate is not None:
                _fallocate(fd, KEEP_SIZE, 0, size)
        finally:
            os.close(fd)


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    """Return the C library's call: Python's writes into the file where the filesystem does not support it."""
    try:
        found = ctypes.CDLL(None).fallocate64
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return found


_fallocate = _find_fallocate()
