"""The outputs of one attempt while they are collected: checked against the contract, under a temporary name.

Names are plain and relative; bytes and entries are limited. `publish` moves everything to its final folder with one
rename.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from holdfast.permissions import make_folder
from holdfast.runner.tree_removal import remove_tree

MAX_DEPTH = 64
MAX_NAME = 255
MAX_PATH = 4096
BLOCK = 1024 * 1024
BAD_NAME = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})
"""Errors of a name that the filesystem cannot store."""
NAMED = 100
"""How many skipped entries are listed by name; the others are only counted."""
SHOWN = 200
"""Characters of a name in a message."""


class ContractViolation(Exception):
    """An output breaks the contract. The message names the file, relative to the work folder, and the rule."""


class SkippedEntry(msgspec.Struct, frozen=True):
    """An entry of `output/` that was not collected."""

    path: str
    reason: str


class ArtifactLimits(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    entries: int = 100_000


class CollectedOutputs:
    """Collects outputs in a temporary folder, which is created with the first entry."""

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
        """The folder of the files until they are published."""
        return self._temporary

    @property
    def empty(self) -> bool:
        return self._entries == 0

    def folder(self, name: str) -> None:
        path = self._path_for(name)
        with blame_child_for(BAD_NAME, name):
            make_folder(path)

    def file(self, name: str, source: IO[bytes], size: int = 0) -> None:
        """Copy a file. With a known size too large a one is refused at once; it may still grow while it is copied."""
        path = self._path_for(name)
        self._check_bytes(name, self._bytes + size)
        with blame_child_for(BAD_NAME, name):
            make_folder(path.parent)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as target:
            while block := source.read(BLOCK):
                self._bytes += len(block)
                self._check_bytes(name, self._bytes)
                target.write(block)

    def skip(self, name: str, reason: str) -> None:
        """Skip an entry. It counts towards the limit of entries."""
        self._skipped += 1
        self._check_entries()
        if len(self.skipped) < NAMED:
            self.skipped.append(SkippedEntry(below_output(name), reason))

    def has(self, name: str) -> bool:
        """Return whether this path was collected, or a file under the name of one of its folders."""
        path = self._temporary / name
        folders = [folder for folder in path.parents if folder.is_relative_to(self._temporary)]
        return os.path.lexists(path) or any(folder.is_file() for folder in folders)

    def drop(self, name: str) -> None:
        """Remove a collected file, and the folders that become empty."""
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
        """Move everything to its final folder with one rename. One that exists is ours, from before a crash."""
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

    def _check_bytes(self, name: str, count: int) -> None:
        if count > self._limits.bytes:
            raise ContractViolation(f"with {below_output(name)} the output is larger than {self._limits.bytes} bytes")

    def _check_entries(self) -> None:
        if self._entries + self._skipped > self._limits.entries:
            raise ContractViolation(f"output has more than {self._limits.entries} entries")


def shown(text: str) -> str:
    """Make a text from a child safe to show: escape control characters and limit its length."""
    text = text[: SHOWN + 1]
    safe = text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
    return safe if len(safe) <= SHOWN else f"{safe[:SHOWN]}…"


def below_output(name: str) -> str:
    return f"output/{shown(name)}"


@contextlib.contextmanager
def blame_child_for(numbers: frozenset[int], name: str) -> Iterator[None]:
    """Map errors that the child caused, and that a retry cannot fix, to ContractViolation."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
        raise ContractViolation(f"{below_output(name)} cannot be collected: {error.strerror}") from error


def checked_name(name: str, below: str = "") -> str:
    """Return a relative path that stays inside its folder, or raise. `below` is put before it in the message."""
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
