"""Repeatable SQL: files of views, functions and triggers, which hold no data. Applied after the numbered migrations.

A change edits the file and raises the revision in its first line; no migration copies it. All files are applied again,
in the order of their names, whenever one of them changed or a numbered migration was applied (which may have dropped a
view that it had to). Each file can be applied to any state: `CREATE OR REPLACE`, and `DROP … IF EXISTS` before what
that cannot replace, for example a function with another signature. That statement stays in the file, and so does a file
that has nothing else left: a recorded file that is unknown here belongs to a newer holdfast.

Two versions on one database: the database records revision and checksum of each file. A holdfast that finds a higher
revision than its own, or a file that it does not have, changes nothing and says so. At the same revision with another
checksum, which only development has, the last one that migrates wins.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Literal

from holdfast.store.queries import Dialect

Recorded = Mapping[str, tuple[int, str]]
"""Revision and checksum by file, as the database has them."""


@dataclass(frozen=True)
class Repeatable:
    name: str
    revision: int
    sql: str

    @property
    def label(self) -> str:
        return f"{self.name} (revision {self.revision})"

    @cached_property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def repeatables(dialect: Dialect) -> Sequence[Repeatable]:
    """All files of a dialect, in the order in which they are applied."""
    found = []
    for file in (resources.files("holdfast.store") / "sql" / dialect / "repeatable").iterdir():
        if file.name.endswith(".sql"):
            text = file.read_text()
            revision = re.match(r"-- revision: (\d+)\n", text)
            if revision is None:
                raise ValueError(f"the first line of {file.name} is not `-- revision: n`")
            found.append(Repeatable(file.name.removesuffix(".sql"), int(revision[1]), text))
    return sorted(found, key=lambda repeatable: repeatable.name)


def compare(known: Sequence[Repeatable], recorded: Recorded) -> Literal["current", "outdated", "newer"]:
    """Say how what a database has relates to the files of this holdfast."""
    revisions = {repeatable.name: repeatable.revision for repeatable in known}
    if any(revision > revisions.get(name, -1) for name, (revision, _) in recorded.items()):
        return "newer"
    wanted = {repeatable.name: (repeatable.revision, repeatable.checksum) for repeatable in known}
    return "current" if wanted == dict(recorded) else "outdated"
