"""Copies a folder in the cheapest way that the filesystem supports: a btrfs subvolume, reflinks, or a plain copy.

A subvolume is copied in one step, whatever its size. Everything else goes through `cp -a`, which keeps owners, modes,
times, links, holes and attributes, and shares blocks if the filesystem can. Each big file has its own `cp`, in parallel
to the one for the rest: the disk writes the big files while a processor creates the many small ones.
"""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from holdfast import permissions as private
from holdfast.errors import CacheFull

Strategy = Literal["subvolume", "reflink", "copy"]

SUBVOLUME_CREATE = 0x5000940E
SNAPSHOT_CREATE = 0x50009417
FICLONE = 0x40049409
SUBVOLUME_ROOT = 256
"""The inode number of every subvolume's top folder."""
_CREATE = struct.Struct("=q4088s")
_SNAPSHOT = struct.Struct("=qQQ32x4040s")
SYNC_FILE_RANGE_WRITE = 2
WRITEBACK_SECONDS = 0.01
"""Seconds between flushes of the copied data to the disk: some ten megabytes."""
BIG = 64 * 2**20
"""Minimum size for a `cp` process of its own, which costs a few milliseconds: a tenth of the copy."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class CopyFailed(OSError):
    """`cp` failed for another reason than a full disk."""


def probe(folder: Path) -> Strategy:
    """Find out what this folder's filesystem supports, by trying it."""
    trial = folder / f".probe-{secrets.token_hex(8)}"
    try:
        if _make_subvolume(trial):
            return "subvolume"
        trial.mkdir(mode=0o700)
        return "reflink" if _reflinks(trial) else "copy"
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Make an empty folder, as a subvolume if possible: then a copy takes one step."""
    if not _make_subvolume(path):
        path.mkdir(mode=0o700)


def copy_folder(source: Path, target: Path, *, to_disk: bool = False) -> Strategy:
    """Copy a folder to a path that does not exist yet, in the cheapest way. Raise CacheFull on a full disk.

    `to_disk`: the copy will be synced, so start writing it to the disk while it is still being made.
    """
    with map_full_disk(target):
        if _snapshot(source, target):
            return "subvolume"
        make_folder(target)
        _copy_entries(source, target, to_disk=to_disk)
    return "copy"


def _copy_entries(source: Path, target: Path, *, to_disk: bool) -> None:
    """Copy the content of a folder, big files in parallel to the rest.

    A big file has a temporary name until `cp` has finished its folder. Until then an empty file with the same time has
    its name, which `cp --update` skips as up to date. The rename changes the folder's times, so they are set again.
    """
    big = [(source / path, target / path, f".{secrets.token_hex(16)}") for path in _big_files(source)]
    for file, copy, _ in big:
        private.make_folder(copy.parent)
        copy.touch(mode=private.FILE)
        _copy_times(file, copy)
    with _cp(source, target, "--update") as rest:
        for file, copy, name in big:
            with _cp(file, copy.with_name(name)) as one:
                if to_disk:
                    start_writeback(one, target)
        if to_disk:
            start_writeback(rest, target)
    for file, copy, name in big:
        copy.unlink()  # Else ext4 writes the file out before the rename: 0.4 s for a gigabyte that need not be synced.
        copy.with_name(name).rename(copy)
        _copy_times(file.parent, copy.parent)


def _big_files(folder: Path) -> Iterator[Path]:
    """Return the big files below a folder, except files with two names: one `cp` has to see both.

    Also except those in a folder that its owner may not write to: after `cp` has finished it, no rename works there.
    """
    for top, _, names in os.walk(folder):
        if os.lstat(top).st_mode & stat.S_IWUSR:
            for name in names:
                entry = os.lstat(f"{top}/{name}")
                if stat.S_ISREG(entry.st_mode) and entry.st_nlink == 1 and entry.st_size >= BIG:
                    yield Path(top, name).relative_to(folder)


def _copy_times(source: Path, target: Path) -> None:
    entry = os.lstat(source)
    os.utime(target, ns=(entry.st_atime_ns, entry.st_mtime_ns))


@contextmanager
def _cp(source: Path, target: Path, *options: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Run `cp` during the block and wait for it afterwards; kill it if the block fails."""
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            ["cp", "-a", "--reflink=auto", *options, "-T", "--", source, target],
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        ) as running:
            try:
                yield running
            except BaseException:
                running.kill()
                raise
        if running.returncode != 0:
            errors.seek(0)
            stderr = errors.read().decode(errors="replace").strip()
            for number in FULL:
                if os.strerror(number) in stderr:
                    raise OSError(number, stderr[-500:])
            raise CopyFailed(_errno_in(stderr), stderr[-500:])


def _errno_in(stderr: str) -> int:
    """Return the errno whose message `cp` wrote last."""
    return next((number for number in errno.errorcode if stderr.endswith(os.strerror(number))), errno.EIO)


def start_writeback(writer: "subprocess.Popen[bytes]", target: Path) -> None:
    """Until a writer ends, start writing out the data of the files that it has open.

    The kernel would wait for much more dirty data, and the sync at the end would have nearly all of it to write.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    while True:
        with suppress(subprocess.TimeoutExpired):
            writer.wait(WRITEBACK_SECONDS)
            return
        for handle in _open_below(writer.pid, target):
            libc.sync_file_range(handle, ctypes.c_int64(0), ctypes.c_int64(0), SYNC_FILE_RANGE_WRITE)
            os.close(handle)


def _open_below(pid: int, target: Path) -> Iterator[int]:
    """Open the files below a folder that a process has open; it may close them at any time."""
    links = Path("/proc", str(pid), "fd")
    with suppress(OSError):
        for name in os.listdir(links):
            with suppress(OSError):
                if os.readlink(links / name).startswith(f"{target.resolve()}/"):
                    yield os.open(links / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


@contextmanager
def map_full_disk(target: Path) -> Iterator[None]:
    """Map a full disk to CacheFull. The advice comes before the path, because a long message is cut at the end."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        reason = os.strerror(error.errno)
        raise CacheFull(f"{reason}: free disk space or remove snapshots; no copy fits into {target.parent}") from error


def sync_filesystem(folder: Path) -> None:
    """Sync the filesystem of a folder."""
    with opened(folder) as handle:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(handle) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder."""
    with opened(folder) as handle:
        os.fsync(handle)


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def _make_subvolume(path: Path) -> bool:
    return _ioctl(path, SUBVOLUME_CREATE, _CREATE.pack(0, os.fsencode(path.name)))


def _snapshot(source: Path, target: Path) -> bool:
    """Copy a subvolume in one step. One that contains another subvolume would lose it, so `cp` copies that."""
    if os.lstat(source).st_ino != SUBVOLUME_ROOT or _contains_subvolume(source):
        return False
    with opened(source) as handle:
        return _ioctl(target, SNAPSHOT_CREATE, _SNAPSHOT.pack(handle, 0, 0, os.fsencode(target.name)))


def _contains_subvolume(folder: Path) -> bool:
    device = os.lstat(folder).st_dev
    return any(os.lstat(Path(top, name)).st_dev != device for top, names, _ in os.walk(folder) for name in names)


def _ioctl(path: Path, request: int, arguments: bytes) -> bool:
    """Make a btrfs call; return False if the filesystem is another one or does not allow it."""
    with opened(path.parent) as handle:
        try:
            fcntl.ioctl(handle, request, bytearray(arguments))
        except OSError as error:
            if error.errno in (*FULL, errno.EEXIST):
                raise
            return False
    return True


def _reflinks(folder: Path) -> bool:
    first, second = folder / "1", folder / "2"
    first.write_bytes(b"\0" * 4096)
    with first.open("rb") as source, second.open("wb") as target, suppress(OSError):
        fcntl.ioctl(target, FICLONE, source.fileno())
        return True
    return False


def kind_of(mode: int) -> str:
    """Return a file's type as one letter, as `find` prints it."""
    return next((name for name, is_kind in _KINDS.items() if is_kind(mode)), "?")


_KINDS = {"f": stat.S_ISREG, "d": stat.S_ISDIR, "l": stat.S_ISLNK, "p": stat.S_ISFIFO, "s": stat.S_ISSOCK}
