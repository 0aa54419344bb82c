"""What an attempt leaves: files under `output/` and an optional `result.json`, taken only if they keep the contract.

Regular files and folders with plain relative names, within caps on bytes and entries, no way out of the folder. Links,
FIFOs, sockets and devices are skipped, never followed, and named to the caller. What is taken is gathered under a
temporary name and published by one rename, into a folder that carries attempt and token: only the one that the job's
finish names is ever shown.
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

from holdfast import decoding
from holdfast.errors import NotFound
from holdfast.permissions import make_folder

MAX_RESULT = 1024 * 1024
MAX_DEPTH = 64
MAX_NAME = 255
MAX_PATH = 4096
BLOCK = 1024 * 1024
MOST_ROUNDS = 1000
OUT_OF_REACH = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR})
"""What a child can do to what it leaves, so that we cannot read it."""
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
BAD_NAME = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})
"""What a name can be, so that we cannot write it."""


NAMED = 100
"""How many skipped entries are named; the others are counted."""
SHOWN = 200
"""Characters of a name in a text."""


class ContractViolation(Exception):
    """What the child left breaks the contract. The text names the file, relative to the work folder, and the rule."""


class SkippedEntry(msgspec.Struct, frozen=True):
    """An entry of `output/` that was not taken."""

    path: str
    reason: str


class ArtifactLimits(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    entries: int = 100_000


class ReportedError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    message: str
    code: str = "reported_failure"


class ResultReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`result.json`: what the child says of its end, in words that are safe to show."""

    version: int
    status: Literal["succeeded", "failed"] = "succeeded"
    result: Any = None
    error: ReportedError | None = None


def parse_report(data: bytes) -> ResultReport:
    try:
        version = decoding.decode(data, dict[str, Any]).get("version")
        if version != 1:
            raise ContractViolation(f"result.json has version {shown(repr(version))}; this holdfast reads version 1")
        report = decoding.decode(data, ResultReport)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ContractViolation(f"result.json cannot be read: {shown(str(error))}") from error
    if report.error is not None and not report.error.code.replace("_", "").isalnum():
        raise ContractViolation(
            f"result.json: error.code {shown(report.error.code)!r} is not letters, digits and underscores"
        )
    return report


class CollectedOutputs:
    """Collects outputs under a temporary name; nothing is there until something was collected."""

    def __init__(self, target: Path, limits: ArtifactLimits, check: Callable[[], None] | None = None) -> None:
        self.target = target
        self._limits = limits
        self._check = check
        self._temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
        self._bytes = 0
        self._entries = 0
        self._skipped = 0
        self.skipped: list[SkippedEntry] = []
        """The first entries that were skipped; `unnamed` counts the others."""
        self.report: bytes | None = None

    @property
    def unnamed(self) -> int:
        return self._skipped - len(self.skipped)

    @property
    def staging(self) -> Path:
        """Where the files are until they are published."""
        return self._temporary

    @property
    def empty(self) -> bool:
        return self._entries == 0

    def folder(self, name: str) -> None:
        path = self._path_for(name)
        with _blame_child_for(BAD_NAME, name):
            make_folder(path)

    def file(self, name: str, source: IO[bytes]) -> None:
        path = self._path_for(name)
        with _blame_child_for(BAD_NAME, name):
            make_folder(path.parent)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as target:
            while block := source.read(BLOCK):
                self._bytes += len(block)
                if self._bytes > self._limits.bytes:
                    raise ContractViolation(f"with {_below(name)} the output is larger than {self._limits.bytes} bytes")
                target.write(block)

    def skip(self, name: str, reason: str) -> None:
        """Leave an entry out. It counts like one that is taken."""
        self._skipped += 1
        self._check_entries()
        if len(self.skipped) < NAMED:
            self.skipped.append(SkippedEntry(_below(name), reason))

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

    def _path_for(self, name: str) -> Path:
        self._entries += 1
        self._check_entries()
        if self._check is not None and self._entries == 1:
            self._check()
        make_folder(self._temporary)
        return self._temporary / checked_name(name, below="output/")

    def _check_entries(self) -> None:
        if self._entries + self._skipped > self._limits.entries:
            raise ContractViolation(f"output has more than {self._limits.entries} entries")


def shown(text: str) -> str:
    """Make a text that a child chose safe to show: no control characters, and not too long."""
    text = text[: SHOWN + 1]
    safe = text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
    return safe if len(safe) <= SHOWN else f"{safe[:SHOWN]}…"


def _below(name: str) -> str:
    return f"output/{shown(name)}"


@contextlib.contextmanager
def _blame_child_for(numbers: frozenset[int], name: str) -> Iterator[None]:
    """Map errors that the child caused, and that waiting does not fix, to Violation; all others are ours."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
        raise ContractViolation(f"{_below(name)} cannot be taken: {error.strerror}") from error


def checked_name(name: str, below: str = "") -> str:
    """Return a relative name that stays where it is put, or refuse it; `below` goes before the name in a refusal."""
    parts = name.split("/")
    if (
        not 0 < len(name.encode("utf-8", "surrogateescape")) <= MAX_PATH
        or len(parts) > MAX_DEPTH
        or any(part in ("", ".", "..") or len(os.fsencode(part)) > MAX_NAME for part in parts)
    ):
        raise ContractViolation(f"{below}{shown(name)!r} is not a plain relative name")
    if not name.isprintable():
        raise ContractViolation(f"{below}{shown(name)} has a name with characters that cannot be printed")
    return name


def collect_folder(work: Path, collected: CollectedOutputs) -> None:
    """Take the outputs of a process from its work folder. Its processes are dead: nothing changes meanwhile."""
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
        raise ContractViolation(f"{_below(prefix)} is nested deeper than {MAX_DEPTH} folders")
    for name in sorted(os.listdir(folder)):
        whole = prefix + name
        with _blame_child_for(OUT_OF_REACH, whole):
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(about.st_mode):
            collected.folder(whole)
            with _blame_child_for(OUT_OF_REACH, whole):
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                _take(inner, f"{whole}/", collected, depth + 1)
            finally:
                os.close(inner)
        elif stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
            with _blame_child_for(OUT_OF_REACH, whole):
                source = _open_regular(name, folder)
            with source:
                collected.file(whole, source)
        else:
            collected.skip(whole, _kind(about.st_mode))


def _kind(mode: int) -> str:
    """Say what an entry is that is not taken; a regular file is one that has a second name."""
    return KINDS.get(stat.S_IFMT(mode), "is not a regular file")


def _kind_of(path: Path, error: OSError) -> str:
    """Say what is there instead of what was to be opened."""
    mode = path.lstat().st_mode
    wrong = error.errno in (errno.ELOOP, errno.ENOTDIR) and not stat.S_ISREG(mode)
    return _kind(mode) if wrong else f"cannot be opened: {error.strerror}"


def remove_tree(root: Path) -> None:
    """Remove a folder with all that is in it, however deep; what cannot be removed stays, and is no error.

    A child may have made folders deeper than a path can be long, or than Python may recurse: the deepest ones are moved
    up before they are removed. A link or file in the place of the folder is removed itself.
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


def _flatten(root: Path) -> bool:
    """Move what is deep below a folder to its top; say whether there was anything."""
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
        raise ContractViolation(f"{shown(os.path.basename(name))} {_kind(about.st_mode)}; it must be a regular file")
    return open(fd, "rb")


def _read_report(path: Path) -> bytes:
    try:
        with _open_regular(path) as source:
            data = source.read(MAX_RESULT + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ContractViolation(f"result.json {_kind_of(path, error)}; it must be a regular file") from error
    if len(data) > MAX_RESULT:
        raise ContractViolation(f"result.json is larger than {MAX_RESULT} bytes")
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


def collect_tar(stream: IO[bytes], collected: CollectedOutputs) -> None:
    """Take the outputs of a container from an archive of `result.json` or of `output`."""
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
        collected.file(inside, source)
    else:
        collected.skip(inside, _kind_in_tar(member))


def _kind_in_tar(member: tarfile.TarInfo) -> str:
    return TAR_KINDS.get(member.type, "is not a regular file")


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size: int


class ArtifactStore:
    """The outputs of all attempts, in the folder that all hosts share.

    `check` is called before something is written: it raises if another folder, or none, is in its place.
    """

    def __init__(self, shared: Path, *, check: Callable[[], None] | None = None) -> None:
        self.root = shared / "artifacts"
        self._check = check

    def folder(self, job_id: str, attempt: int, token: int) -> Path:
        return self.root / job_id / f"{attempt}.{token}"

    def collection(self, job_id: str, attempt: int, token: int, limits: ArtifactLimits) -> CollectedOutputs:
        return CollectedOutputs(self.folder(job_id, attempt, token), limits, self._check)

    def list(self, job_id: str, attempt: int, token: int) -> Sequence[Artifact]:
        """The files that one attempt left, by name."""
        return list(self._files(self.folder(job_id, attempt, token)))

    def open(self, job_id: str, attempt: int, token: int, path: str) -> IO[bytes]:
        """Open one file for reading, looking again at every step of the way: no link is followed."""
        try:
            parts = checked_name(path).split("/")
            fd = os.open(self.folder(job_id, attempt, token), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for part in parts[:-1]:
                    inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                    os.close(fd)
                    fd = inner
                return _open_regular(parts[-1], fd)
            finally:
                os.close(fd)
        except (ContractViolation, OSError):
            raise NotFound("artifact", path) from None

    def jobs(self, after: str, limit: int) -> Sequence[str]:
        """Return the jobs that have a folder here, sorted, after `after`."""
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
