"""Raise the revision of each repeatable SQL file whose text is not the recorded one: `make schema` runs this.

A released revision never changes: a holdfast tells by it whether a database has newer views and functions than its own.
"""

import re
from pathlib import Path

from holdfast.store.repeatable import repeatables
from holdfast.store.sql_entries import Dialect

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests/store/schema/repeatables.txt"
FILES = ROOT / "src/holdfast/store/sql/repeatable"
DIALECTS: tuple[Dialect, ...] = ("postgres", "sqlite")


def recorded() -> dict[tuple[str, str], tuple[int, str]]:
    """Return revision and checksum by dialect and name."""
    lines = [line.split() for line in RECORDED.read_text().splitlines()]
    return {(dialect, name): (int(revision), checksum) for dialect, name, revision, checksum in lines}


def stale() -> dict[Path, int]:
    """Return the files that changed under a recorded revision, each with its next revision."""
    before = recorded()
    found: dict[Path, int] = {}
    for dialect in DIALECTS:
        for one in repeatables(dialect):
            revision, checksum = before.get((dialect, one.name), (0, ""))
            if one.revision <= revision and one.checksum != checksum:
                shared, own = FILES / f"{one.name}.sql", FILES / dialect / f"{one.name}.sql"
                found[shared if shared.exists() else own] = revision + 1
    return found


def write() -> None:
    for file, revision in stale().items():
        file.write_text(re.sub(r"\A-- revision: \d+", f"-- revision: {revision}", file.read_text()))


if __name__ == "__main__":
    write()
