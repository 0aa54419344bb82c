"""Migrations: numbered SQL files, each applied once, in order, in one transaction under one lock; then the repeatable
ones (`repeatable`), which are applied again when they change. `migration_plan` decides what a database needs.

A store opens only on the schema it was written for, or on a newer one that says that it still fits: any other is
refused, and the error says what to do.
"""

import json
import logging
import re
import sqlite3
from collections.abc import Sequence
from importlib import resources
from typing import Any

from holdfast.errors import SchemaMismatch
from holdfast.store.migration_plan import (
    AppliedMigration,
    Conversion,
    Migration,
    Records,
    Step,
    plan,
    state_of_migrations,
)
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.queries import in_schema
from holdfast.store.repeatable import AppliedFile, repeatables, state_of_files
from holdfast.store.sql_entries import Dialect
from holdfast.store.sqlite import SqliteDatabase

log = logging.getLogger(__name__)

_LOCK = 0x686F6C64  # "hold": one migration at a time per database, taken for the transaction only
OUTDATED = "the database's views and functions are not those of this holdfast: run `holdfast migrate`"
EARLIER = "the database records the earlier series of migrations: run `holdfast migrate` to convert it"


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
    return (await _records(database)).version


async def pending(database: SqliteDatabase | PostgresDatabase) -> Sequence[Step]:
    """Return what `migrate` would apply."""
    dialect = dialect_of(database)
    return plan(dialect, migrations(dialect), repeatables(dialect), await _records(database))


async def migrate(database: SqliteDatabase | PostgresDatabase, *, upto: int | None = None) -> Sequence[Step]:
    """Migrate the database to this version of holdfast; return what was applied. Idempotent, also concurrently.

    `upto` stops after a numbered migration; repeatable files are applied only after the last one.
    """
    if isinstance(database, SqliteDatabase):
        return await database.migrate(lambda connection: _migrate_sqlite(connection, upto))
    return await database.with_transaction(lambda connection: _migrate_postgres(connection, database.schema, upto))


async def require_current(database: SqliteDatabase | PostgresDatabase) -> None:
    """Refuse a database that was not migrated, or was migrated by a newer holdfast and no longer fits this one."""
    dialect, records = dialect_of(database), await _records(database)
    known = migrations(dialect)
    if records.of_earlier_series:
        raise SchemaMismatch(EARLIER)
    numbered = state_of_migrations(known, records)
    if numbered == "outdated":
        raise SchemaMismatch(
            f"the database's schema is at version {records.version}, this holdfast needs {len(known)}: "
            "run `holdfast migrate`"
        )
    repeated = state_of_files(repeatables(dialect), records.files)
    if "ahead" in (numbered, repeated):
        log.info("the database was migrated by a newer holdfast; this one may still use it: upgrade it soon")
    elif repeated == "outdated":
        raise SchemaMismatch(OUTDATED)


def script(dialect: Dialect, step: Step, schema: str) -> str:
    """The SQL of one step as it will run."""
    return in_schema(step.sql, schema) if dialect == "postgres" else step.sql


async def _records(database: SqliteDatabase | PostgresDatabase) -> Records:
    if isinstance(database, SqliteDatabase):
        return await database.migrate(_sqlite_records)
    return await database.with_transaction(lambda connection: _postgres_records(connection, database.schema))


def _sqlite_records(connection: sqlite3.Connection) -> Records:
    def rows(table: str) -> list[dict[str, Any]]:
        if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (table,)).fetchone() is None:
            return []
        cursor = connection.execute(f"SELECT * FROM {table}")
        return [dict(zip((column[0] for column in cursor.description), row, strict=True)) for row in cursor.fetchall()]

    return _read(rows("migrations"), rows("repeatables"))


async def _postgres_records(connection: Any, schema: str) -> Records:
    async def rows(table: str) -> list[dict[str, Any]]:
        if not await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", f"{schema}.{table}"):
            return []
        # As JSON: the columns differ between databases, and a prepared statement must not change its columns.
        found = await connection.fetch(f"SELECT to_jsonb(r)::text FROM {schema}.{table} AS r")
        return [json.loads(row[0]) for row in found]

    return _read(await rows("migrations"), await rows("repeatables"))


def _read(numbered: Sequence[dict[str, Any]], files: Sequence[dict[str, Any]]) -> Records:
    """Read the records. Those of the earlier series have fewer columns."""
    applied = [AppliedMigration(row["number"], row["name"], row.get("checksum"), row.get("oldest")) for row in numbered]
    return Records(
        sorted(applied, key=lambda one: one.number),
        {row["file"]: AppliedFile(row["revision"], row["checksum"], row.get("oldest", 0)) for row in files},
    )


def _migrate_sqlite(connection: sqlite3.Connection, upto: int | None) -> Sequence[Step]:
    """Inside BEGIN IMMEDIATE: a second migrator waits, then finds nothing to do."""
    connection.execute(
        "CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY, name TEXT NOT NULL, "
        "applied_at INTEGER NOT NULL, checksum TEXT NOT NULL, oldest INTEGER NOT NULL)"
    )
    todo = plan("sqlite", migrations("sqlite"), repeatables("sqlite"), _sqlite_records(connection), upto)
    for step in todo:
        for statement in split_statements(step.sql):
            connection.execute(statement)
        if isinstance(step, Migration | Conversion):
            done = migrations("sqlite")[0] if isinstance(step, Conversion) else step
            connection.execute(
                "INSERT INTO migrations (number, name, applied_at, checksum, oldest) VALUES (?, ?, clock(), ?, ?)",
                (done.number, done.name, done.checksum, done.oldest),
            )
        else:
            connection.execute(
                "INSERT OR REPLACE INTO repeatables (file, revision, checksum, oldest, applied_at)"
                " VALUES (?, ?, ?, ?, clock())",
                (step.name, step.revision, step.checksum, step.oldest),
            )
    return todo


async def _migrate_postgres(connection: Any, schema: str, upto: int | None) -> Sequence[Step]:
    """Inside one transaction, whose lock ends with it: that works through a pooler too."""
    await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
    await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    await connection.execute(
        f"CREATE TABLE IF NOT EXISTS {schema}.migrations (number integer PRIMARY KEY, name text NOT NULL, "
        "applied_at timestamptz NOT NULL, checksum text NOT NULL, oldest integer NOT NULL)"
    )
    records = await _postgres_records(connection, schema)
    todo = plan("postgres", migrations("postgres"), repeatables("postgres"), records, upto)
    for step in todo:
        await connection.execute(in_schema(step.sql, schema))
        if isinstance(step, Migration | Conversion):
            done = migrations("postgres")[0] if isinstance(step, Conversion) else step
            await connection.execute(
                f"INSERT INTO {schema}.migrations (number, name, applied_at, checksum, oldest)"
                " VALUES ($1, $2, clock_timestamp(), $3, $4)",
                *(done.number, done.name, done.checksum, done.oldest),
            )
        else:
            await connection.execute(
                f"INSERT INTO {schema}.repeatables (file, revision, checksum, oldest, applied_at)"
                " VALUES ($1, $2, $3, $4, clock_timestamp()) ON CONFLICT (file)"
                " DO UPDATE SET revision = excluded.revision, checksum = excluded.checksum, oldest = excluded.oldest,"
                " applied_at = excluded.applied_at",
                *(step.name, step.revision, step.checksum, step.oldest),
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
