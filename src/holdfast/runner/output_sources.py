"""Reads the outputs of an attempt: from its work folder on this host, or from the tar stream of a Docker engine.

Only regular files and folders are taken. Links, FIFOs, sockets and devices are skipped, never followed.
"""

import asyncio
import contextlib
import errno
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO

from holdfast.runner.collected_outputs import (
    MAX_DEPTH,
    CollectedOutputs,
    ContractViolation,
    below_output,
    blame_child_for,
    shown,
)
from holdfast.runner.result_report import MAX_RESULT

OUT_OF_REACH = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR})
"""Errors of an entry that the child made unreadable for us."""
KINDS = {
    stat.S_IFLNK: "is a symbolic link",
    stat.S_IFIFO: "is a FIFO",
    stat.S_IFSOCK: "is a socket",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
    stat.S_IFREG: "is a hard link",
    stat.S_IFDIR: "is a folder",
}
TAR_KINDS = {
    tarfile.SYMTYPE: KINDS[stat.S_IFLNK],
    tarfile.LNKTYPE: KINDS[stat.S_IFREG],
    tarfile.FIFOTYPE: KINDS[stat.S_IFIFO],
    tarfile.CHRTYPE: KINDS[stat.S_IFCHR],
    tarfile.BLKTYPE: KINDS[stat.S_IFBLK],
    tarfile.DIRTYPE: KINDS[stat.S_IFDIR],
}


def collect_folder(work: Path, collected: CollectedOutputs) -> None:
    """Collect the outputs of a process from its work folder. Its processes are dead, so nothing changes meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        collected.report = _read_report(work / "result.json")
    try:
        fd = os.open(work / "output", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ContractViolation(f"output {_kind_of(work / 'output', error)}; it must be a folder") from error
    try:
        _take(fd, "", collected)
    finally:
        os.close(fd)


def _take(folder: int, prefix: str, collected: CollectedOutputs, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ContractViolation(f"{below_output(prefix)} is nested deeper than {MAX_DEPTH} folders")
    for name in sorted(os.listdir(folder)):
        whole = prefix + name
        with blame_child_for(OUT_OF_REACH, whole):
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(about.st_mode):
            collected.folder(whole)
            with blame_child_for(OUT_OF_REACH, whole):
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                _take(inner, f"{whole}/", collected, depth + 1)
            finally:
                os.close(inner)
        elif stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
            with blame_child_for(OUT_OF_REACH, whole):
                source = open_regular(name, folder)
            with source:
                collected.file(whole, source, about.st_size)
        else:
            collected.skip(whole, _kind(about.st_mode))


def _kind(mode: int) -> str:
    """Describe an entry that is skipped. A regular file is skipped because it has a second name."""
    return KINDS.get(stat.S_IFMT(mode), "is not a regular file")


def _kind_of(path: Path, error: OSError) -> str:
    """Describe what was found instead of the expected file or folder."""
    mode = path.lstat().st_mode
    wrong = error.errno in (errno.ELOOP, errno.ENOTDIR) and not stat.S_ISREG(mode)
    return _kind(mode) if wrong else f"cannot be opened: {error.strerror}"


def open_regular(name: str | Path, folder: int | None = None) -> IO[bytes]:
    """Open a regular file that has only one name: with a second name it may be another user's file."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(fd)
        raise ContractViolation(f"{shown(os.path.basename(name))} {_kind(about.st_mode)}; it must be a regular file")
    return open(fd, "rb")


def _read_report(path: Path) -> bytes:
    try:
        with open_regular(path) as source:
            data = source.read(MAX_RESULT + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ContractViolation(f"result.json {_kind_of(path, error)}; it must be a regular file") from error
    if len(data) > MAX_RESULT:
        raise ContractViolation(f"result.json is larger than {MAX_RESULT} bytes")
    return data


async def read_in_thread(chunks: AsyncIterator[bytes], take: Callable[[IO[bytes]], None]) -> None:
    """Pass a stream to a function that reads it in a thread. The function is not called for an empty stream."""
    first = await anext(chunks, b"")
    if not first:
        return
    reader, writer = os.pipe()
    reading = asyncio.ensure_future(asyncio.to_thread(_read_all, reader, take))
    try:
        with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "wb", buffering=0) as sink:
            await asyncio.to_thread(_write, sink, first)
            async for chunk in chunks:
                await asyncio.to_thread(_write, sink, chunk)
    except BaseException:
        # The stream broke off. An error of the reader is only a consequence, so it is dropped.
        await asyncio.wait([reading])
        reading.exception()
        raise
    await reading


def _read_all(reader: int, take: Callable[[IO[bytes]], None]) -> None:
    with open(reader, "rb") as source:
        take(source)


def _write(sink: IO[bytes], chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[sink.write(view) :]


def collect_tar(stream: IO[bytes], collected: CollectedOutputs) -> None:
    """Collect the outputs of a container from a tar archive of `result.json` or of `output`."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                _take_member(archive, member, collected)
    except tarfile.TarError as error:
        raise ContractViolation(f"the archive of its output cannot be read: {error}") from error


def _take_member(archive: tarfile.TarFile, member: tarfile.TarInfo, collected: CollectedOutputs) -> None:
    name = member.name.rstrip("/")
    if name == "result.json":
        source = archive.extractfile(member) if member.isreg() else None
        if source is None:
            raise ContractViolation(f"result.json {_kind_in_tar(member)}; it must be a regular file")
        if member.size > MAX_RESULT:
            raise ContractViolation(f"result.json is larger than {MAX_RESULT} bytes")
        collected.report = source.read()
        return
    if name == "output" and member.isdir():
        return
    if name == "output":
        raise ContractViolation(f"output {_kind_in_tar(member)}; it must be a folder")
    if not name.startswith("output/"):
        raise ContractViolation(f"{shown(name)} is not below output")
    inside = name.removeprefix("output/")
    source = archive.extractfile(member) if member.isreg() else None
    if member.isdir():
        collected.folder(inside)
    elif source is not None:
        collected.file(inside, source, member.size)
    else:
        collected.skip(inside, _kind_in_tar(member))


def _kind_in_tar(member: tarfile.TarInfo) -> str:
    return TAR_KINDS.get(member.type, "is not a regular file")
