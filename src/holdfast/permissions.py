"""File modes of what holdfast stores on disk: readable by its owner only, whatever the umask.

A folder that a job's own user must traverse is 0711: nobody else can list it, and its content has its own modes.
All other folders are 0700, and files 0600. The folder of an attempt with its own group is 0710: only that group can
traverse it, so that a job which opens the modes of its own folders exposes them to nobody.
"""

import os
import stat
from pathlib import Path

PASSABLE = 0o711
PASSABLE_FOR_GROUP = 0o710
PRIVATE = 0o700
FILE = 0o600
SYSTEM = frozenset(map(Path, ("/var/lib", "/var/local", "/usr/local", "/usr/lib")))
"""Folders that other programs need, besides `/` and those directly below it."""


def make_folder(path: Path, mode: int = PRIVATE) -> None:
    """Make a folder and its missing parents with exactly this mode; tighten the mode of an existing folder."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not path.is_dir():
            raise
        tighten(path, mode)
        return
    except FileNotFoundError:
        make_folder(path.parent, mode)
        make_folder(path, mode)
        return
    os.chmod(path, mode)  # The umask may have removed bits.


def make_parents(path: Path) -> None:
    """Make the missing folders above a path, traversable by others; leave existing ones alone."""
    if not path.parent.is_dir():
        make_folder(path.parent, PASSABLE)


def make_passable(path: Path) -> None:
    """Make a folder that others can traverse but not list; change the mode of an existing one."""
    make_folder(path, PASSABLE)
    if stat.S_IMODE(path.stat().st_mode) != PASSABLE and not is_system_folder(path):
        os.chmod(path, PASSABLE)


def make_passable_for(path: Path, gid: int) -> None:
    """Let only one group traverse a folder of ours."""
    os.chown(path, -1, gid)
    os.chmod(path, PASSABLE_FOR_GROUP)


def tighten(path: Path, mode: int) -> None:
    """Remove permissions that a folder or file of ours should not grant.

    A shared place such as /tmp is left alone, and so are a device and a folder of the system: a setting may name
    /dev/null, or /var.
    """
    if is_system_folder(path):
        return
    about = path.stat()
    now = stat.S_IMODE(about.st_mode)
    if not (stat.S_ISDIR(about.st_mode) or stat.S_ISREG(about.st_mode)):
        return
    if now & ~mode & 0o777 and about.st_uid == os.geteuid() and not now & stat.S_ISVTX:
        os.chmod(path, now & mode)


def is_system_folder(path: Path) -> bool:
    """Return whether a folder is used by the whole host, so that its mode must not be changed."""
    place = path.resolve()
    return len(place.parts) <= 2 or place in SYSTEM


def write_file(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE), "wb") as file:
        file.write(data)


def make_file(path: Path) -> None:
    """Make an empty file that only its owner can read; tighten the mode of an existing one."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE))
    except FileExistsError:
        tighten(path, FILE)
