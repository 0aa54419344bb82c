"""Migrations: numbered SQL files, each applied once, in order, in one transaction under one lock.

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
from holdfast.store.sqlite import SqliteDatabase

_LOCK = 0x686F6C64  # "hold": one migration at a time per database, taken for the transaction only


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    sql: str


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


def pending(dialect: Dialect, version: int) -> Sequence[Migration]:
    return [migration for migration in migrations(dialect) if migration.number > version]


async def version(database: SqliteDatabase | PostgresDatabase) -> int:
    """Return the number of the last migration that this database has; 0 for none."""
    if isinstance(database, SqliteDatabase):
        return await database.migrate(_sqlite_version)
    rows = await database.fetch("SELECT to_regclass($1) IS NOT NULL AS found", f"{database.schema}.migrations")
    if not rows[0]["found"]:
        return 0
    rows = await database.fetch(f"SELECT coalesce(max(number), 0) AS number FROM {database.schema}.migrations")
    return int(rows[0]["number"])


async def migrate(database: SqliteDatabase | PostgresDatabase, *, upto: int | None = None) -> Sequence[Migration]:
    """Migrate the database to this version of holdfast; return what was applied. Idempotent, also concurrently."""
    if isinstance(database, SqliteDatabase):
        return await database.migrate(lambda connection: _migrate_sqlite(connection, upto))
    return await database.with_transaction(lambda connection: _migrate_postgres(connection, database.schema, upto))


async def require_current(database: SqliteDatabase | PostgresDatabase) -> None:
    """Refuse a database that was not migrated, or was migrated by a newer holdfast."""
    dialect: Dialect = "sqlite" if isinstance(database, SqliteDatabase) else "postgres"
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


def script(dialect: Dialect, number: int, schema: str) -> str:
    """The SQL of one migration as it will run."""
    text = migrations(dialect)[number - 1].sql
    return in_schema(text, schema) if dialect == "postgres" else text


def _sqlite_version(connection: sqlite3.Connection) -> int:
    table = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'migrations'").fetchone()
    if not table:
        return 0
    return int(connection.execute("SELECT coalesce(max(number), 0) FROM migrations").fetchone()[0])


def _migrate_sqlite(connection: sqlite3.Connection, upto: int | None) -> Sequence[Migration]:
    """Inside BEGIN IMMEDIATE: a second migrator waits, then finds nothing to do."""
    connection.execute(
        "CREATE TABLE IF NOT EXISTS migrations "
        "(number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at INTEGER NOT NULL)"
    )
    todo = [m for m in pending("sqlite", _sqlite_version(connection)) if upto is None or m.number <= upto]
    for migration in todo:
        for statement in split_statements(migration.sql):
            connection.execute(statement)
        connection.execute("INSERT INTO migrations VALUES (?, ?, clock())", (migration.number, migration.name))
    return todo


async def _migrate_postgres(connection: Any, schema: str, upto: int | None) -> Sequence[Migration]:
    """Inside one transaction, whose lock ends with it: that works through a pooler too."""
    await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
    await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    await connection.execute(
        f"CREATE TABLE IF NOT EXISTS {schema}.migrations "
        "(number integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL)"
    )
    done = await connection.fetchval(f"SELECT coalesce(max(number), 0) FROM {schema}.migrations")
    todo = [m for m in pending("postgres", done) if upto is None or m.number <= upto]
    for migration in todo:
        await connection.execute(in_schema(migration.sql, schema))
        await connection.execute(
            f"INSERT INTO {schema}.migrations VALUES ($1, $2, clock_timestamp())", migration.number, migration.name
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
