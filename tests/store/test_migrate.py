"""Migrations: idempotent, numbered, equal to the schema that is dumped, and refused where they do not fit."""

import os
import re
import subprocess
import sys
from collections.abc import Awaitable
from operator import methodcaller
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.errors import HoldfastError, SchemaMismatch, StoreUnreachable
from holdfast.store.migrate import migrate, migrations, require_current, split_statements, version
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.store import Store, connect, open_store
from tests.conftest import drop
from tests.support.store_harness import StoreHarness

SCHEMAS = Path(__file__).parent / "schema"


@pytest.fixture
async def empty_url(kind: str, tmp_path: Path, server: str) -> Any:
    """A database without a schema."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    admin = await asyncpg.connect(server)
    await admin.execute("DROP DATABASE IF EXISTS holdfast_empty WITH (FORCE)")
    await admin.execute("CREATE DATABASE holdfast_empty")
    await admin.close()
    yield server.rsplit("/", 1)[0] + "/holdfast_empty"
    await drop(server, "holdfast_empty")


async def dumped(database: Any) -> str:
    """The schema as the database itself tells it."""
    if isinstance(database, SqliteDatabase):
        rows = await database.migrate(
            lambda connection: connection.execute(
                "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type, name"
            ).fetchall()
        )
        return "\n".join(row[0] for row in rows) + "\n"
    parts = [
        "SELECT table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable || ' '"
        " || coalesce(column_default, '') FROM information_schema.columns WHERE table_schema = 'holdfast'"
        " ORDER BY table_name, ordinal_position",
        "SELECT indexdef FROM pg_indexes WHERE schemaname = 'holdfast' ORDER BY indexname",
        "SELECT conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint"
        " WHERE connamespace = 'holdfast'::regnamespace ORDER BY conname, conrelid::regclass::text",
        "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'holdfast'::regnamespace ORDER BY proname",
        "SELECT viewname || E'\\n' || definition FROM pg_views WHERE schemaname = 'holdfast' ORDER BY viewname",
        "SELECT relname || ' ' || reloptions::text FROM pg_class WHERE relnamespace = 'holdfast'::regnamespace"
        " AND reloptions IS NOT NULL ORDER BY relname",
    ]
    lines = []
    for part in parts:
        lines += [row[0] for row in await database.fetch(part)]
    return "\n".join(lines) + "\n"


async def test_migrating_again_changes_nothing(empty_url: str) -> None:
    """Proves O2."""
    database = await connect(empty_url, listen=False)
    assert await version(database) == 0
    applied = await migrate(database)
    assert [migration.number for migration in applied] == list(range(1, len(applied) + 1))
    before = await dumped(database)
    assert await migrate(database) == []
    assert await dumped(database) == before
    assert await version(database) == len(applied)
    await database.close()


async def test_installation_has_an_id_that_stays(empty_url: str) -> None:
    """Proves R1."""
    database = await connect(empty_url, listen=False)
    await migrate(database)
    async with Store(database) as store:
        first = await store.installation()
        assert re.fullmatch(r"[0-9a-f]{32}", first)
        await migrate(database)
    async with await open_store(empty_url, listen=False) as store:
        assert await store.installation() == first


async def test_migrations_one_by_one_equal_the_dumped_schema(kind: str, empty_url: str) -> None:
    """Proves O2."""
    database = await connect(empty_url, listen=False)
    for migration in migrations("sqlite" if kind == "sqlite" else "postgres"):
        applied = await migrate(database, upto=migration.number)
        assert [done.number for done in applied] == [migration.number]
    found = await dumped(database)
    await database.close()
    kept = SCHEMAS / f"{kind}.sql"
    if os.environ.get("HOLDFAST_WRITE_SCHEMA"):
        kept.write_text(found)
    assert found == kept.read_text(), "the schema changed: if that is meant, `make schema` writes it again"


async def test_unmigrated_schema_is_refused_with_the_way_out(empty_url: str) -> None:
    """Proves O2."""
    with pytest.raises(SchemaMismatch, match=r"version 0, this holdfast needs \d+: run `holdfast migrate`"):
        await open_store(empty_url, listen=False)


async def test_newer_schema_is_refused_with_the_way_out(kind: str, empty_url: str) -> None:
    """Proves O2."""
    database = await connect(empty_url, listen=False)
    await migrate(database)
    insert = "INSERT INTO {}migrations VALUES (999, 'future', {})"
    if isinstance(database, SqliteDatabase):
        await database.migrate(lambda connection: connection.execute(insert.format("", "1")))
    else:
        await database.fetch(insert.format("holdfast.", "now()"))
    with pytest.raises(SchemaMismatch, match=r"newer than this holdfast knows .*upgrade holdfast"):
        await require_current(database)
    await database.close()


def test_statements_are_split_where_they_end() -> None:
    assert split_statements("CREATE TABLE a (b TEXT DEFAULT ';'); -- x;\nSELECT 1;") == [
        "CREATE TABLE a (b TEXT DEFAULT ';');",
        " -- x;\nSELECT 1;",
    ]


async def test_unreachable_database_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreachable, match="cannot reach Postgres"):
        await connect("postgresql://holdfast@127.0.0.1:1/none")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreUnreachable, match="cannot open the SQLite file"):
        await connect(f"sqlite:///{tmp_path / 'file' / 'store.db'}")
    (tmp_path / "text.db").write_text("this is no database, whatever its name says" * 100)
    with pytest.raises(StoreUnreachable, match="cannot open the SQLite file"):
        await connect(f"sqlite:///{tmp_path / 'text.db'}")


def holdfast(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", **environment},
    )


def test_command_line_migrates_shows_and_explains(kind: str, empty_url: str) -> None:
    """Proves O2."""
    planned = holdfast("migrate", "--database-url", empty_url, "--dry-run", "--show-sql")
    assert planned.returncode == 0, planned.stderr
    assert "would apply 0001 core" in planned.stdout
    assert "CREATE TABLE" in planned.stdout
    assert "would apply 0001 core" in holdfast("migrate", "--dry-run", HOLDFAST_DATABASE_URL=empty_url).stdout
    done = holdfast("migrate", HOLDFAST_DATABASE_URL=empty_url)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "applied 0001 core")
    again = holdfast("migrate", DATABASE_URL=empty_url)
    assert (again.returncode, again.stdout.strip()) == (0, "nothing to do: the schema is current")


def test_command_line_says_what_is_wrong() -> None:
    unreachable = holdfast("migrate", "--database-url", "postgresql://holdfast@127.0.0.1:1/none")
    assert (unreachable.returncode, unreachable.stderr.count("\n")) == (3, 1)
    assert "cannot reach Postgres" in unreachable.stderr
    bad = holdfast("migrate", "--database-url", "mysql://x/y", HOLDFAST_LEASE_TTL="soon", HOLDFAST_SCHEMA="a b")
    assert bad.returncode == 2
    for problem in ("HOLDFAST_LEASE_TTL", "HOLDFAST_SCHEMA", "mysql"):
        assert problem in bad.stderr


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


async def test_labels_of_a_store_from_before_lists_are_found(kind: str, empty_url: str) -> None:
    """Proves O2, J14."""
    database = await connect(empty_url, listen=False)
    await migrate(database, upto=2)
    for sql in (OLD_JOB, OLD_SPEC):
        if isinstance(database, SqliteDatabase):
            await database.migrate(methodcaller("execute", sql.format(schema="", id=OLD_ID, at=1)))
        else:
            await database.fetch(sql.format(schema="holdfast.", id=OLD_ID, at="'2026-01-17T09:00:00Z'"))
    await migrate(database)
    async with Store(database) as store:
        assert [job.id for job in (await store.jobs.list(labels={"team": "blue"})).items] == [OLD_ID]


async def test_jobs_from_before_any_runner_are_kept(kind: str, empty_url: str) -> None:
    """On SQLite their specs are copied; indexes, views and the trigger that removes labels are made again."""
    database = await connect(empty_url)
    await migrate(database, upto=14)
    async with Store(database) as store:
        before = [
            await store.jobs.submit({"runner": "process", "spec": {"command": ["true"]}, "labels": {"n": str(n)}})
            for n in range(3)
        ]
        assert next(migration.number for migration in await migrate(database)) == 15
        after = (await store.jobs.list(labels={"n": "1"})).items
        assert [job.id for job in after] == [before[1].id]
        assert [await store.jobs.get(job.id) for job in before] == before
        assert len((await store.events.page(before[0].id)).items) == 1
        await store.jobs.cancel(before[1].id)
        await store.jobs.delete(before[1].id)
        assert (await store.jobs.list(labels={"n": "1"})).items == []


@pytest.mark.parametrize("name", ["function:resize", "Process", "", "a" * 64])
async def test_a_runner_that_could_be_read_as_another_capability_is_refused(name: str, harness: StoreHarness) -> None:
    """By the database, because a submit by SQL is not checked by the registry."""
    await harness.store.jobs.submit({"runner": "process", "spec": {"command": ["true"]}})
    written = "UPDATE {}specs SET runner = '" + name + "'"
    database = harness.store.database
    if isinstance(database, SqliteDatabase):
        work: Awaitable[object] = database.migrate(methodcaller("execute", written.format("")))
    else:
        work = database.fetch(written.format("holdfast."))
    with pytest.raises(HoldfastError, match="runner_named"):
        await work
