"""Repeatable SQL: files of views, functions and triggers, which hold no data. Applied after the numbered migrations.

A file in `sql/repeatable` is for both dialects: SQLite's text is made from Postgres' (`sqlite_text`). One in a folder
of a dialect is for that one. What subscribes to moves of jobs (`on_move.sql`) is added to the function that accepts
jobs.

A change edits the file and raises the revision in its first line, which `make schema` does; no migration copies it. All
files are applied again, in the order of their names, whenever one of them changed or a numbered migration was applied
(which may have dropped a view that it had to). Each file can be applied to any state: `CREATE OR REPLACE`, and
`DROP … IF EXISTS` before what that cannot replace, for example a function with another signature. That statement stays
in the file, and so does a file that has nothing else left: a recorded file that is unknown here belongs to a newer
holdfast.

Two versions on one database: the database records revision and checksum of each file, and the oldest revision whose
holdfast may still use it, from the line `-- oldest: n` after the revision; without that line only its own. A holdfast
that finds a higher revision than its own, or a file that it does not have, changes nothing: it goes on if it may, and
otherwise says that it is too old. At the same revision with another checksum, which only development has, the last one
that migrates wins.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Literal

from holdfast.errors import SchemaMismatch
from holdfast.store import queries
from holdfast.store.sql_entries import Dialect
from holdfast.store.sqlite_text import sqlite_text

State = Literal["outdated", "current", "ahead"]
"""How a database relates to this holdfast; `ahead`: migrated by a newer one, and still usable."""
NEWER = "the database's views and functions are newer than this holdfast can use: upgrade holdfast"


@dataclass(frozen=True)
class Repeatable:
    """A file of views, functions or triggers, applied again when it changes."""

    name: str
    revision: int
    sql: str

    @property
    def label(self) -> str:
        return f"{self.name} (revision {self.revision})"

    @property
    def oldest(self) -> int:
        """The lowest revision whose holdfast may still use this file; 0 if one without the file may."""
        stated = re.match(r"-- revision: \d+\n-- oldest: (\d+)\n", self.sql)
        return self.revision if stated is None else int(stated[1])

    @cached_property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


@dataclass(frozen=True)
class AppliedFile:
    """What a database records about a repeatable file."""

    revision: int
    checksum: str
    oldest: int


def repeatables(dialect: Dialect) -> Sequence[Repeatable]:
    """All files of a dialect, in the order in which they are applied."""
    folder = resources.files("holdfast.store") / "sql" / "repeatable"
    found = [_repeatable(file, sqlite_text if dialect == "sqlite" else str) for file in _files(folder)]
    added = queries.subscribers(dialect)
    for file in _files(folder / dialect):
        found.append(_repeatable(file, lambda text: "\n".join(queries.with_subscribers(text, added))))
    return sorted(found, key=lambda repeatable: repeatable.name)


def _files(folder: resources.abc.Traversable) -> list[resources.abc.Traversable]:
    return [file for file in folder.iterdir() if file.name.endswith(".sql")]


def _repeatable(file: resources.abc.Traversable, form: Callable[[str], str]) -> Repeatable:
    text = file.read_text()
    revision = re.match(r"-- revision: (\d+)\n", text)
    if revision is None:
        raise ValueError(f"the first line of {file.name} is not `-- revision: n`")
    return Repeatable(file.name.removesuffix(".sql"), int(revision[1]), form(text))


def state_of_files(files: Sequence[Repeatable], records: Mapping[str, AppliedFile]) -> State:
    """Compare the repeatable files of a database with those of this holdfast."""
    revisions = {one.name: one.revision for one in files}
    newer = {name: one for name, one in records.items() if one.revision > revisions.get(name, 0)}
    if any(one.oldest > revisions.get(name, 0) for name, one in newer.items()):
        raise SchemaMismatch(NEWER)
    if newer:
        return "ahead"
    wanted = {one.name: (one.revision, one.checksum) for one in files}
    found = {name: (one.revision, one.checksum) for name, one in records.items()}
    return "current" if wanted == found else "outdated"
