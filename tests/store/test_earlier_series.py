"""Databases of the earlier series of migrations: converted if they have all, else refused with the way out."""

import re
from collections.abc import Awaitable, Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import SchemaMismatch
from holdfast.store.migrate import dialect_of, migrate, migrations, pending, require_current, split_statements, version
from holdfast.store.migration_plan import Conversion
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.repeatable import repeatables
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.store import Store, connect
from tests.store.test_migrate import dumped, empty_url, run_sql

__all__ = ["empty_url"]

EARLIER = Path(__file__).parent / "earlier_series"
TABLES = (
    "CREATE TABLE migrations (number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at INTEGER NOT NULL)",
    "CREATE SCHEMA holdfast; CREATE TABLE holdfast.migrations"
    " (number integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL)",
)
OLD_ID = "01980000-0000-7000-8000-000000000001"
OLD_JOB = (
    "INSERT INTO {schema}jobs (id, tenant, queue, capability, priority, status, gate, max_attempts,"
    " requested_at, available_at, updated_at)"
    " VALUES ('{id}', 'default', 'default', 'process', 0, 'queued', 'open', 1, {at}, {at}, {at})"
)
OLD_SPEC = (
    "INSERT INTO {schema}specs (id, tenant, kind, requested_at, runner, spec, inputs, labels)"
    " VALUES ('{id}', 'default', 'run', {at}, 'process', '{{}}', '{{}}', '{{\"team\":\"blue\"}}')"
)


async def run_script(database: SqliteDatabase | PostgresDatabase, text: str) -> None:
    if isinstance(database, SqliteDatabase):
        for statement in split_statements(text):
            await database.migrate(methodcaller("execute", statement))
    else:
        await database.with_transaction(lambda connection: connection.execute(text))


async def migrate_as_before(database: SqliteDatabase | PostgresDatabase, upto: int = 16) -> None:
    """Apply the earlier series up to a number, as the holdfast of that time did, with a job from its early days."""
    sqlite = isinstance(database, SqliteDatabase)
    schema, at = ("", "1") if sqlite else ("holdfast.", "'2026-01-17T09:00:00Z'")
    await run_script(database, TABLES[0 if sqlite else 1] + ";")
    for file in sorted((EARLIER / dialect_of(database)).iterdir())[:upto]:
        await run_script(database, file.read_text())
        number, name = file.stem.split("_", 1)
        await run_script(database, f"INSERT INTO {schema}migrations VALUES ({int(number)}, '{name}', {at});")
        if number == "0002":
            for sql in (OLD_JOB, OLD_SPEC):
                await run_script(database, sql.format(schema=schema, id=OLD_ID, at=at) + ";")


async def structure(database: SqliteDatabase | PostgresDatabase) -> str:
    """The schema as the database describes it. SQLite also keeps how a table was written, so ask for its parts."""
    if not isinstance(database, SqliteDatabase):
        return await dumped(database)

    def read(connection: Any) -> str:
        tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name").fetchall()
        lines = []
        for (table,) in tables:
            sql = connection.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table,)).fetchone()[0]
            checks = sorted(re.findall(r"CONSTRAINT (\w+ CHECK .*?)(?=,?\s*(?:CONSTRAINT|\n\)))", sql, re.DOTALL))
            columns = connection.execute("SELECT * FROM pragma_table_xinfo(?)", (table,)).fetchall()
            indexes = connection.execute("SELECT name, [unique], origin FROM pragma_index_list(?)", (table,)).fetchall()
            lines += [table, *map(str, sorted(columns)), *map(str, sorted(indexes)), *checks, sql.rsplit(")", 1)[1]]
        others = "SELECT sql FROM sqlite_schema WHERE type <> 'table' AND sql IS NOT NULL ORDER BY type, name"
        return "\n".join([*lines, *(sql for (sql,) in connection.execute(others).fetchall())])

    return await database.migrate(read)


async def test_complete_earlier_series_is_converted_without_a_loss(tmp_path: Path, kind: str, empty_url: str) -> None:
    """The result has the schema of a new database, and the jobs of the old one with their labels. Proves O2."""
    database = await connect(empty_url)
    await migrate_as_before(database)
    with pytest.raises(SchemaMismatch, match="earlier series of migrations: run `holdfast migrate` to convert it"):
        await require_current(database)
    planned = await pending(database)
    assert isinstance(planned[0], Conversion)
    later = migrations(dialect_of(database))[1:]
    assert planned[1:] == [*later, *repeatables(dialect_of(database))]
    assert await migrate(database) == planned
    assert await version(database) == 1 + len(later)
    assert await pending(database) == await migrate(database) == []
    await require_current(database)
    converted = await structure(database)
    async with Store(database) as store:
        assert [job.id for job in (await store.jobs.list(labels={"team": "blue"})).items] == [OLD_ID]
        assert (await store.jobs.get(OLD_ID)).runner == "process"
        assert len((await store.events.page(OLD_ID)).items) == 1
        await store.jobs.cancel(OLD_ID)
        await store.jobs.delete(OLD_ID)
        assert (await store.jobs.list(labels={"team": "blue"})).items == []
    assert converted == await structure_of_a_new_database(tmp_path, kind, empty_url)


async def structure_of_a_new_database(tmp_path: Path, kind: str, url: str) -> str:
    new = await connect(f"sqlite:///{tmp_path / 'new.db'}" if kind == "sqlite" else url, listen=False)
    if kind == "postgres":
        await run_sql(new, "DROP SCHEMA holdfast CASCADE")
    await migrate(new)
    found = await structure(new)
    await new.close()
    return found


@pytest.mark.parametrize("upto", [1, 12, 15])
async def test_part_of_the_earlier_series_is_refused_with_the_way_out(empty_url: str, upto: int) -> None:
    """Nothing is changed: the holdfast of that time can still migrate it to its end. Proves O2."""
    database = await connect(empty_url, listen=False)
    await migrate_as_before(database, upto)
    before = await dumped(database)
    calls: list[Callable[[Any], Awaitable[object]]] = [migrate, pending]
    for call in calls:
        with pytest.raises(SchemaMismatch, match=rf"up to {upto:04} \w+: run `holdfast migrate` of holdfast 0.1 first"):
            await call(database)
    assert await dumped(database) == before
    await database.close()
