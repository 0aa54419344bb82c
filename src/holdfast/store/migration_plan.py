"""Which migrations a database still needs, from what it records about those that it has. No database access.

A migration is known by number, name and checksum: a database with another name or checksum under a number is refused,
because its schema may be another one. A released migration never changes; a test compares the checksums.

Rolling upgrades: each migration after the first says in its first line which schema version is the oldest whose
holdfast may still run on the result (`-- oldest: 3`), and a repeatable file says the same about its revisions. The
database records these numbers, so an older holdfast that finds a newer schema knows whether it may go on. It never
migrates.

Databases from before the migrations were joined into one have another first migration, `core`. One that has all of that
earlier series has the schema of today's first migration: only what it records is converted. Any other is refused.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources

from holdfast.errors import SchemaMismatch
from holdfast.store.repeatable import AppliedFile, Repeatable, State, state_of_files
from holdfast.store.sql_entries import Dialect

EARLIER_FIRST, EARLIER_LAST = "core", (16, "any_runner")
EARLIER_HOLDFAST = "0.1"
CONVERSION_FILE = "convert_earlier_series.sql"


@dataclass(frozen=True)
class Migration:
    """A numbered file, applied once."""

    number: int
    name: str
    sql: str

    @property
    def label(self) -> str:
        return f"{self.number:04} {self.name}"

    @property
    def oldest(self) -> int:
        """The lowest schema version whose holdfast may still run once this migration is applied."""
        stated = re.match(r"-- oldest: (\d+)\n", self.sql)
        if stated is None and self.number > 1:
            raise ValueError(f"the first line of migration {self.label} is not `-- oldest: n`")
        return self.number if stated is None else int(stated[1])

    @cached_property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


@dataclass(frozen=True)
class Conversion:
    """Converts the records of a database that has all migrations of the earlier series."""

    sql: str
    name: str = "earlier_series"

    @property
    def label(self) -> str:
        return f"records of the {EARLIER_LAST[0]} earlier migrations, as one"


Step = Migration | Conversion | Repeatable


@dataclass(frozen=True)
class AppliedMigration:
    """What a database records about a numbered migration; the earlier series recorded only number and name."""

    number: int
    name: str
    checksum: str | None = None
    oldest: int | None = None


@dataclass(frozen=True)
class Records:
    """What a database records: its numbered migrations in order, and its repeatable files by name."""

    migrations: Sequence[AppliedMigration] = ()
    files: Mapping[str, AppliedFile] = field(default_factory=dict)

    @property
    def of_earlier_series(self) -> bool:
        return bool(self.migrations) and self.migrations[0].name == EARLIER_FIRST

    @property
    def version(self) -> int:
        """The number of the last migration; 0 for none."""
        return 0 if not self.migrations or self.of_earlier_series else self.migrations[-1].number


def conversion(dialect: Dialect) -> Conversion:
    return Conversion((resources.files("holdfast.store") / "migrations" / dialect / CONVERSION_FILE).read_text())


def plan(
    dialect: Dialect,
    known: Sequence[Migration],
    files: Sequence[Repeatable],
    records: Records,
    upto: int | None = None,
) -> Sequence[Step]:
    """Return the steps that bring a database to this holdfast's schema; none if it is ahead.

    Raise SchemaMismatch for a database that this holdfast cannot migrate. `upto` stops after a numbered migration;
    repeatable files are applied only after the last one.
    """
    if records.of_earlier_series:
        _require_all_of_earlier_series(records)
        first = known[0]
        converted = Records([AppliedMigration(1, first.name, first.checksum, first.oldest)])
        # The repeatable files are applied in any case, as the record has none of them.
        return [conversion(dialect), *plan(dialect, known, files, converted, upto)]
    numbered = state_of_migrations(known, records)
    repeated = state_of_files(files, records.files)
    if "ahead" in (numbered, repeated):
        return []
    missing = [one for one in known if one.number > records.version and (upto is None or one.number <= upto)]
    complete = (missing[-1].number if missing else records.version) == len(known)
    return [*missing, *(files if complete and (missing or repeated == "outdated") else ())]


def state_of_migrations(known: Sequence[Migration], records: Records) -> State:
    """Compare the numbered migrations of a database with those of this holdfast, by name and checksum."""
    for own, applied in zip(known, records.migrations, strict=False):
        if (own.number, own.name, own.checksum) != (applied.number, applied.name, applied.checksum):
            raise SchemaMismatch(
                f"migration {applied.number:04} {applied.name} of the database is not this holdfast's {own.label}: "
                "use the holdfast that migrated the database, or restore a backup"
            )
    newer = records.migrations[len(known) :]
    if any(one.oldest is None or one.oldest > len(known) for one in newer):
        raise SchemaMismatch(
            f"the database's schema is at version {records.version}, newer than this holdfast knows ({len(known)}): "
            "upgrade holdfast"
        )
    return "ahead" if newer else "current" if records.version == len(known) else "outdated"


def _require_all_of_earlier_series(records: Records) -> None:
    last = records.migrations[-1]
    if (last.number, last.name) != EARLIER_LAST:
        raise SchemaMismatch(
            f"the database has only a part of the earlier series of migrations, up to {last.number:04} {last.name}: "
            f"run `holdfast migrate` of holdfast {EARLIER_HOLDFAST} first, then of this one"
        )
