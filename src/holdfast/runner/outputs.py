"""What an attempt leaves: files under `output/` and an optional `result.json`, taken only if they keep the contract.

Regular files and folders with plain relative names, within caps on bytes and entries: no links, FIFOs or devices, no
way out of the folder. They are gathered under a temporary name and published by one rename, into a folder that carries
attempt and token: only the one that the job's finish names is ever shown.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import stat
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from holdfast.errors import NotFound

MAX_RESULT = 1024 * 1024
MAX_DEPTH = 64
MAX_NAME = 255
MAX_PATH = 4096
BLOCK = 1024 * 1024
MOST_ROUNDS = 1000
OUT_OF_REACH = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR})
"""What a child can do to what it leaves, so that we cannot read it."""
BAD_NAME = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})
"""What a name can be, so that we cannot write it."""


class Violation(Exception):
    """What the child left breaks the contract. The text is for operators."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    entries: int = 100_000


class ReportedError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    message: str
    code: str = "reported_failure"


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`result.json`: what the child says of its end, in words that are safe to show."""

    version: int
    status: Literal["succeeded", "failed"] = "succeeded"
    result: Any = None
    error: ReportedError | None = None


def parse_report(data: bytes) -> Report:
    try:
        version = msgspec.json.decode(data, type=dict[str, Any]).get("version")
        if version != 1:
            raise Violation(f"result.json has version {version!r}; this holdfast reads 1")
        report = msgspec.json.decode(data, type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Violation(f"result.json: {error}") from error
    if report.error is not None and not report.error.code.replace("_", "").isalnum():
        raise Violation(f"result.json: {report.error.code!r} is no error code")
    return report


class Gathered:
    """Collects outputs under a temporary name; nothing is there until something was collected."""

    def __init__(self, target: Path, limits: Limits) -> None:
        self.target = target
        self._limits = limits
        self._temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
        self._bytes = 0
        self._entries = 0
        self.report: bytes | None = None

    @property
    def place(self) -> Path:
        """Where the files are until they are published."""
        return self._temporary

    @property
    def empty(self) -> bool:
        return self._entries == 0

    def folder(self, name: str) -> None:
        path = self._place(name)
        with _to_blame(BAD_NAME, name):
            path.mkdir(mode=0o750, parents=True, exist_ok=True)

    def file(self, name: str, source: IO[bytes]) -> None:
        path = self._place(name)
        with _to_blame(BAD_NAME, name):
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        with open(fd, "wb") as target:
            while block := source.read(BLOCK):
                self._bytes += len(block)
                if self._bytes > self._limits.bytes:
                    raise Violation(f"its output is over {self._limits.bytes} bytes")
                target.write(block)

    def holds(self, name: str) -> bool:
        """Whether something was gathered under this name, or a file in the place of one of its folders."""
        path = self._temporary / name
        folders = [folder for folder in path.parents if folder.is_relative_to(self._temporary)]
        return os.path.lexists(path) or any(folder.is_file() for folder in folders)

    def drop(self, name: str) -> None:
        """Forget a file that was gathered, and the folders that are empty without it."""
        path = self._temporary / name
        self._bytes -= path.stat().st_size
        self._entries -= 1
        path.unlink()
        with contextlib.suppress(OSError):
            for folder in path.parents:
                if folder == self._temporary:
                    break
                folder.rmdir()

    def publish(self) -> None:
        """Put all of it in place at once. What is there already was put there by ourselves, before a crash."""
        if self.empty:
            return
        remove_tree(self.target)
        self._temporary.rename(self.target)

    def discard(self) -> None:
        remove_tree(self._temporary)

    def _place(self, name: str) -> Path:
        self._entries += 1
        if self._entries > self._limits.entries:
            raise Violation(f"its output has over {self._limits.entries} entries")
        self._temporary.mkdir(mode=0o750, parents=True, exist_ok=True)
        return self._temporary / plain(name)


@contextlib.contextmanager
def _to_blame(numbers: frozenset[int], name: str) -> Iterator[None]:
    """These errors are the child's doing, and no waiting mends them; all others are ours."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
        raise Violation(f"{name[:200]!r} cannot be taken: {error.strerror}") from error


def plain(name: str) -> str:
    """Return a relative name that stays where it is put, or refuse it."""
    parts = name.split("/")
    if (
        not 0 < len(name.encode("utf-8", "surrogateescape")) <= MAX_PATH
        or len(parts) > MAX_DEPTH
        or any(part in ("", ".", "..") or len(os.fsencode(part)) > MAX_NAME for part in parts)
    ):
        raise Violation(f"{name[:200]!r} is no plain relative name")
    if not name.isprintable():
        raise Violation(f"{name[:200]!r} is no name that can be shown")
    return name


def take_folder(work: Path, gathered: Gathered) -> None:
    """Take the outputs of a process from its work folder. Its processes are dead: nothing changes meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        gathered.report = _read_report(work / "result.json")
    try:
        fd = os.open(work / "output", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise Violation("output is no folder") from error
    try:
        _take(fd, "", gathered)
    finally:
        os.close(fd)


def _take(folder: int, prefix: str, gathered: Gathered, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise Violation(f"{prefix[:200]!r} is deeper than {MAX_DEPTH} folders")
    for name in sorted(os.listdir(folder)):
        whole = prefix + name
        with _to_blame(OUT_OF_REACH, whole):
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            gathered.folder(whole)
            with _to_blame(OUT_OF_REACH, whole):
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                _take(inner, f"{whole}/", gathered, depth + 1)
            finally:
                os.close(inner)
        elif stat.S_ISREG(mode):
            with _to_blame(OUT_OF_REACH, whole):
                source = _open_regular(name, folder)
            with source:
                gathered.file(whole, source)
        else:
            raise Violation(f"{whole[:200]!r} is neither a file nor a folder")


def remove_tree(root: Path) -> None:
    """Remove a folder with all that is in it, however deep; what cannot be removed stays, and is no error.

    A child may have made folders deeper than a path can be long, or than Python may recurse: the deepest ones are moved
    up before they are removed.
    """
    for _ in range(MOST_ROUNDS):
        with contextlib.suppress(RecursionError):
            shutil.rmtree(root, ignore_errors=True)
        if not root.exists():
            return
        if not _flatten(root):
            return


def _flatten(root: Path) -> bool:
    """Move what is deep below a folder to its top; say whether there was anything."""
    moved = False
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in os.listdir(fd):
            moved |= _lift(fd, name)
    except OSError:
        return False
    finally:
        os.close(fd)
    return moved


def _lift(root: int, name: str) -> bool:
    """Go down along the first folders, and hang what is below them at the top."""
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


def _open_regular(name: str | Path, folder: int | None = None) -> IO[bytes]:
    """Open a regular file that has one name only: another one might be somebody else's."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(fd)
        raise Violation(f"{str(name)[:200]!r} is not a plain file of its own")
    return open(fd, "rb")


def _read_report(path: Path) -> bytes:
    try:
        with _open_regular(path) as source:
            data = source.read(MAX_RESULT + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Violation(f"result.json: {error.strerror}") from error
    if len(data) > MAX_RESULT:
        raise Violation(f"result.json is over {MAX_RESULT} bytes")
    return data


async def pour(chunks: AsyncIterator[bytes], take: Callable[[IO[bytes]], None]) -> None:
    """Hand a stream to something that reads it, in a thread of its own; nothing is read if nothing comes."""
    first = await anext(chunks, b"")
    if not first:
        return
    reader, writer = os.pipe()
    taking = asyncio.ensure_future(asyncio.to_thread(_taken, reader, take))
    try:
        with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "wb", buffering=0) as sink:
            await asyncio.to_thread(_write, sink, first)
            async for chunk in chunks:
                await asyncio.to_thread(_write, sink, chunk)
    except BaseException:
        # It broke off on its way to us: that is why it cannot be read to its end, and not for what is in it.
        await asyncio.wait([taking])
        taking.exception()
        raise
    await taking


def _taken(reader: int, take: Callable[[IO[bytes]], None]) -> None:
    with open(reader, "rb") as source:
        take(source)


def _write(sink: IO[bytes], chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[sink.write(view) :]


def take_tar(stream: IO[bytes], gathered: Gathered) -> None:
    """Take the outputs of a container from an archive of `result.json` or of `output`."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                _take_member(archive, member, gathered)
    except tarfile.TarError as error:
        raise Violation(f"the archive of its output cannot be read: {error}") from error


def _take_member(archive: tarfile.TarFile, member: tarfile.TarInfo, gathered: Gathered) -> None:
    name = member.name.rstrip("/")
    if name == "result.json":
        source = archive.extractfile(member) if member.isreg() else None
        if source is None or member.size > MAX_RESULT:
            raise Violation("result.json is not a plain file, or too large")
        gathered.report = source.read()
        return
    if name == "output" and member.isdir():
        return
    if not name.startswith("output/"):
        raise Violation(f"{name[:200]!r} is not what was asked for")
    inside = name.removeprefix("output/")
    source = archive.extractfile(member) if member.isreg() else None
    if member.isdir():
        gathered.folder(inside)
    elif source is not None:
        gathered.file(inside, source)
    else:
        raise Violation(f"{name[:200]!r} is neither a file nor a folder")


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size: int


class Artifacts:
    """The outputs of all attempts, in the folder that all hosts share."""

    def __init__(self, shared: Path) -> None:
        self.root = shared / "artifacts"

    def folder(self, job_id: str, attempt: int, token: int) -> Path:
        return self.root / job_id / f"{attempt}.{token}"

    def gather(self, job_id: str, attempt: int, token: int, limits: Limits) -> Gathered:
        return Gathered(self.folder(job_id, attempt, token), limits)

    def list(self, job_id: str, attempt: int, token: int) -> Sequence[Artifact]:
        """The files that one attempt left, by name."""
        return list(self._files(self.folder(job_id, attempt, token)))

    def open(self, job_id: str, attempt: int, token: int, path: str) -> IO[bytes]:
        """Open one file for reading, looking again at every step of the way: no link is followed."""
        try:
            parts = plain(path).split("/")
            fd = os.open(self.folder(job_id, attempt, token), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for part in parts[:-1]:
                    inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                    os.close(fd)
                    fd = inner
                return _open_regular(parts[-1], fd)
            finally:
                os.close(fd)
        except (Violation, OSError):
            raise NotFound("artifact", path) from None

    def jobs(self, after: str, limit: int) -> Sequence[str]:
        """The jobs that have a folder here, in order, behind one."""
        try:
            names = sorted(name for name in os.listdir(self.root) if name > after)
        except FileNotFoundError:
            return ()
        return names[:limit]

    def attempts(self, job_id: str) -> Sequence[str]:
        """The names of a job's folders, also of those that were never published."""
        try:
            return sorted(os.listdir(self.root / job_id))
        except FileNotFoundError:
            return ()

    def age(self, job_id: str, name: str, now: float) -> float:
        try:
            return now - (self.root / job_id / name).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def remove(self, job_id: str, name: str | None = None) -> None:
        """Remove one folder of a job, or all of them."""
        remove_tree(self.root / job_id / name if name else self.root / job_id)

    def _files(self, folder: Path, prefix: str = "") -> Iterator[Artifact]:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._files(Path(entry.path), f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                yield Artifact(path=f"{prefix}{entry.name}", size=entry.stat(follow_symlinks=False).st_size)
