"""Changes the owner of folder trees, between holdfast and the users of attempts.

A child may have put links anywhere into a tree. So each entry is opened relative to the descriptor of its folder, no
link is followed, and the kernel refuses an entry that changed its type meanwhile.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DEEPEST = 256
"""Maximum nesting of folders; each level needs an open descriptor."""
PLAIN = 0o777
"""The mode bits that are kept of a child's files: not setuid, setgid or sticky."""


def give(top: Path, uid: int, gid: int) -> None:
    """Make a user the owner of a folder tree."""
    with _opened(top) as fd:
        os.fchown(fd, uid, gid)
        for folder, name, _ in _below(fd):
            os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)


def give_if_there(top: Path, uid: int, gid: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        give(top, uid, gid)


def take_over(top: Path) -> None:
    """Make ourselves the owner of a folder tree, and clear setuid and setgid bits. Without root we own it already."""
    uid, gid = os.geteuid(), os.getegid()
    with _opened(top) as fd:
        _take(os.fstat(fd), fd, uid, gid)
        for folder, name, about in _below(fd):
            if uid == 0 and (about.st_uid, about.st_gid) != (uid, gid):
                os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
            if about.st_mode & ~PLAIN & 0o7777 and not stat.S_ISLNK(about.st_mode):
                with _opened_at(folder, name, about.st_mode) as entry:
                    _take(os.fstat(entry), entry, uid, gid)


def _take(about: os.stat_result, fd: int, uid: int, gid: int) -> None:
    if uid == 0 and (about.st_uid, about.st_gid) != (uid, gid):
        os.fchown(fd, uid, gid)
    if about.st_mode & ~PLAIN & 0o7777:
        os.fchmod(fd, about.st_mode & PLAIN)


def _below(top: int, depth: int = 1) -> Iterator[tuple[int, str, os.stat_result]]:
    """Yield (descriptor of its folder, name, status) of each entry below a folder, parents first."""
    if depth > DEEPEST:
        raise OSError(errno.ENAMETOOLONG, f"folders are nested deeper than {DEEPEST}")
    for name in os.listdir(top):
        about = os.stat(name, dir_fd=top, follow_symlinks=False)
        yield top, name, about
        if stat.S_ISDIR(about.st_mode):
            inner = os.open(name, FOLDER, dir_fd=top)
            try:
                yield from _below(inner, depth + 1)
            finally:
                os.close(inner)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened_at(folder: int, name: str, mode: int) -> Iterator[int]:
    flags = FOLDER if stat.S_ISDIR(mode) else os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)
