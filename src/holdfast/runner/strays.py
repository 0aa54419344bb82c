"""Removes what an attempt without a private view left on the host: files in world-writable folders, System V objects.

Needed where the kernel does not allow mount namespaces. Only the top level of each folder is searched; below it, only
the user's own folders are writable for the user, and those are removed whole.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from holdfast.runner.tree_removal import remove_tree

OPEN_FOLDERS = ("/tmp", "/var/tmp", "/run/lock", "/dev/shm", "/dev/mqueue")
REMOVE = 0
"""IPC_RMID."""
SYSTEM_V = Path("/proc/sysvipc")


def remove_strays(uid: int) -> list[str]:
    """Remove what belongs to a user that has no processes. Return what could not be removed."""
    left = [entry for folder in OPEN_FOLDERS for entry in _remove_files(folder, uid)]
    for kind in ("shm", "msg", "sem"):
        left += _remove_objects(kind, uid)
    return left


def _remove_files(folder: str, uid: int) -> list[str]:
    left = []
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_uid == uid and not _remove(entry):
                    left.append(entry.path)
    return left


def _remove(entry: "os.DirEntry[str]") -> bool:
    with contextlib.suppress(OSError):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            os.unlink(entry.path)
    return not os.path.lexists(entry.path)


def _remove_objects(kind: str, uid: int) -> list[str]:
    """Remove the shared memory, queues or semaphores that a user created or owns."""
    libc = ctypes.CDLL(None, use_errno=True)
    remove: dict[str, Callable[[int], int]] = {
        "shm": lambda number: libc.shmctl(number, REMOVE, None),
        "msg": lambda number: libc.msgctl(number, REMOVE, None),
        "sem": lambda number: libc.semctl(number, 0, REMOVE),
    }
    left = []
    with contextlib.suppress(FileNotFoundError):
        titles, *lines = [line.split() for line in (SYSTEM_V / kind).read_text().splitlines()]
        for fields in lines:
            found = dict(zip(titles, fields, strict=True))
            if str(uid) in (found["uid"], found["cuid"]) and remove[kind](int(found[f"{kind}id"])) != 0:
                left.append(f"{kind} {found[f'{kind}id']}")
    return left
