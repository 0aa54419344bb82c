"""Migrations: numbered SQL files, each applied once, in order, in one transaction under one lock; then the repeatable
ones (`repeatable`), which are applied again when they change.

A store opens only on the schema it was written for: an older or newer one is refused, and the error says what to do.
"""

import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from holdfast.errors import SchemaMismatch
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.queries import Dialect, in_schema
from holdfast.store.repeatable import Recorded, Repeatable, compare, repeatables
from holdfast.store.sqlite import SqliteDatabase

_LOCK = 0x686F6C64  # "hold": one migration at a time per database, taken for the transaction only
NEWER = "the database's views and functions are newer than this holdfast knows: upgrade holdfast"
OUTDATED = "the database's views and functions are not those of this holdfast: run `holdfast migrate`"


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    sql: str

    @property
    def label(self) -> str:
        return f"{self.number:04} {self.name}"


Step = Migration | Repeatable


def migrations(dialect: Dialect) -> Sequence[Migration]:
    """All migrations of a dialect, in order, numbered from 1 without gaps."""
    found = []
    for file in (resources.files("holdfast.store") / "migrations" / dialect).iterdir():
        named = re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name)
        if named:
            found.append(Migration(int(named.group(1)), named.group(2), file.read_text()))
    found.sort(key=lambda migration: migration.number)
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"migrations of {dialect} are not numbered 1, 2, 3 …")
    return found


def dialect_of(database: SqliteDatabase | PostgresDatabase) -> Dialect:
    return "sqlite" if isinstance(database, SqliteDatabase) else "postgres"


async def version(database: SqliteDatabase | PostgresDatabase) -> int:
    """Return the number of the last migration that this database has; 0 for none."""
    if isinstance(database, SqliteDatabase):
        return await database.migrate(_sqlite_version)
    return await database.with_transaction(lambda connection: _postgres_version(connection, database.schema))


async def pending(database: SqliteDatabase | PostgresDatabase) -> Sequence[Step]:
    """Return what `migrate` would apply."""
    return _plan(dialect_of(database), await version(database), await _recorded(database))


async def migrate(database: SqliteDatabase | PostgresDatabase, *, upto: int | None = None) -> Sequence[Step]:
    """Migrate the database to this version of holdfast; return what was applied. Idempotent, also concurrently.

    `upto` stops after a numbered migration; repeatable files are applied only after the last one.
    """
    if isinstance(database, SqliteDatabase):
        return await database.migrate(lambda connection: _migrate_sqlite(connection, upto))
    return await database.with_transaction(lambda connection: _migrate_postgres(connection, database.schema, upto))


async def require_current(database: SqliteDatabase | PostgresDatabase) -> None:
    """Refuse a database that was not migrated, or was migrated by a newer holdfast."""
    dialect = dialect_of(database)
    wanted = len(migrations(dialect))
    found = await version(database)
    if found < wanted:
        raise SchemaMismatch(
            f"the database's schema is at version {found}, this holdfast needs {wanted}: run `holdfast migrate`"
        )
    if found > wanted:
        raise SchemaMismatch(
            f"the database's schema is at version {found}, newer than this holdfast knows ({wanted}): upgrade holdfast"
        )
    match compare(repeatables(dialect), await _recorded(database)):
        case "newer":
            raise SchemaMismatch(NEWER)
        case "outdated":
            raise SchemaMismatch(OUTDATED)


def script(dialect: Dialect, step: Step, schema: str) -> str:
    """The SQL of one step as it will run."""
    return in_schema(step.sql, schema) if dialect == "postgres" else step.sql


def _plan(dialect: Dialect, version: int, recorded: Recorded, upto: int | None = None) -> Sequence[Step]:
    known, files = migrations(dialect), repeatables(dialect)
    todo = [one for one in known if one.number > version and (upto is None or one.number <= upto)]
    state = compare(files, recorded)
    if state == "newer":
        raise SchemaMismatch(NEWER)
    complete = (todo[-1].number if todo else version) == len(known)
    return [*todo, *(files if complete and (todo or state == "outdated") else ())]


async def _recorded(database: SqliteDatabase | PostgresDatabase) -> Recorded:
    if isinstance(database, SqliteDatabase):
        return await database.migrate(_sqlite_recorded)
    return await database.with_transaction(lambda connection: _postgres_recorded(connection, database.schema))


def _sqlite_version(connection: sqlite3.Connection) -> int:
    if not _sqlite_has(connection, "migrations"):
        return 0
    return int(connection.execute("SELECT coalesce(max(number), 0) FROM migrations").fetchone()[0])


def _sqlite_recorded(connection: sqlite3.Connection) -> Recorded:
    if not _sqlite_has(connection, "repeatables"):
        return {}
    rows = connection.execute("SELECT file, revision, checksum FROM repeatables").fetchall()
    return {file: (revision, checksum) for file, revision, checksum in rows}


def _sqlite_has(connection: sqlite3.Connection, table: str) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (table,)).fetchone() is not None


def _migrate_sqlite(connection: sqlite3.Connection, upto: int | None) -> Sequence[Step]:
    """Inside BEGIN IMMEDIATE: a second migrator waits, then finds nothing to do."""
    connection.execute(
        "CREATE TABLE IF NOT EXISTS migrations "
        "(number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at INTEGER NOT NULL)"
    )
    todo = _plan("sqlite", _sqlite_version(connection), _sqlite_recorded(connection), upto)
    for step in todo:
        for statement in split_statements(step.sql):
            connection.execute(statement)
        if isinstance(step, Migration):
            connection.execute("INSERT INTO migrations VALUES (?, ?, clock())", (step.number, step.name))
        else:
            connection.execute(
                "INSERT OR REPLACE INTO repeatables VALUES (?, ?, ?, clock())",
                (step.name, step.revision, step.checksum),
            )
    return todo


async def _postgres_version(connection: Any, schema: str) -> int:
    if not await _postgres_has(connection, f"{schema}.migrations"):
        return 0
    return int(await connection.fetchval(f"SELECT coalesce(max(number), 0) FROM {schema}.migrations"))


async def _postgres_recorded(connection: Any, schema: str) -> Recorded:
    if not await _postgres_has(connection, f"{schema}.repeatables"):
        return {}
    rows = await connection.fetch(f"SELECT file, revision, checksum FROM {schema}.repeatables")
    return {row["file"]: (row["revision"], row["checksum"]) for row in rows}


async def _postgres_has(connection: Any, table: str) -> bool:
    return bool(await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", table))


async def _migrate_postgres(connection: Any, schema: str, upto: int | None) -> Sequence[Step]:
    """Inside one transaction, whose lock ends with it: that works through a pooler too."""
    await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
    await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    await connection.execute(
        f"CREATE TABLE IF NOT EXISTS {schema}.migrations "
        "(number integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL)"
    )
    done, recorded = await _postgres_version(connection, schema), await _postgres_recorded(connection, schema)
    todo = _plan("postgres", done, recorded, upto)
    for step in todo:
        await connection.execute(in_schema(step.sql, schema))
        if isinstance(step, Migration):
            await connection.execute(
                f"INSERT INTO {schema}.migrations VALUES ($1, $2, clock_timestamp())", step.number, step.name
            )
        else:
            await connection.execute(
                f"INSERT INTO {schema}.repeatables VALUES ($1, $2, $3, clock_timestamp()) ON CONFLICT (file)"
                " DO UPDATE SET revision = excluded.revision, checksum = excluded.checksum,"
                " applied_at = excluded.applied_at",
                step.name,
                step.revision,
                step.checksum,
            )
    return todo


def split_statements(text: str) -> list[str]:
    """Split a SQLite script where a statement is complete."""
    statements, start = [], 0
    for end in (match.end() for match in re.finditer(";", text)):
        if sqlite3.complete_statement(text[start:end]):
            statements.append(text[start:end])
            start = end
    return statements
