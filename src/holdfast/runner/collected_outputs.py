"""The outputs of one attempt while they are collected: checked against the contract, and not visible yet.

Names are plain and relative; bytes and entries are limited. A `FileWriter` stores the files, and publishes all of them
with one step.
"""

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from typing import IO

import msgspec

from holdfast.runner.artifacts import FileWriter

MAX_DEPTH = 64
MAX_NAME = 255
MAX_PATH = 4096
BLOCK = 1024 * 1024
BAD_NAME = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})
"""Errors of a name that a store of files cannot keep."""
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
    """Collects outputs with a writer, which is not used before the first entry."""

    def __init__(self, writer: FileWriter, limits: ArtifactLimits) -> None:
        self._writer = writer
        self._limits = limits
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
    def empty(self) -> bool:
        return self._entries == 0

    def folder(self, name: str) -> None:
        self._add_entry(name)
        with blame_child_for(BAD_NAME, name):
            self._writer.folder(name)

    def file(self, name: str, source: IO[bytes], size: int = 0) -> None:
        """Copy a file. With a known size too large a one is refused at once; it may still grow while it is copied."""
        self._add_entry(name)
        self._check_bytes(name, self._bytes + size)
        with blame_child_for(BAD_NAME, name):
            target = self._writer.create(name)
        with target:
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
        return self._writer.has(name)

    def digest(self, name: str) -> str | None:
        """Return the SHA-256 of a collected file; None if there is none."""
        if (source := self._writer.open(name)) is None:
            return None
        with source:
            return hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]

    def drop(self, name: str) -> None:
        """Remove a collected file, and the folders that become empty."""
        self._bytes -= self._writer.drop(name)
        self._entries -= 1

    def publish(self) -> None:
        """Make everything visible with one step, unless there is nothing."""
        if not self.empty:
            self._writer.publish()

    def discard(self) -> None:
        self._writer.discard()

    def _add_entry(self, name: str) -> None:
        self._entries += 1
        self._check_entries()
        checked_name(name, below="output/")

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
