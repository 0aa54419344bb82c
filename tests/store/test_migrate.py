"""Migrations: idempotent, numbered, equal to the schema that is dumped, and refused where they do not fit."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable
from operator import methodcaller
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from scripts import revisions

from holdfast.errors import HoldfastError, SchemaMismatch, StoreUnreachable
from holdfast.store.migrate import (
    dialect_of,
    migrate,
    migrations,
    pending,
    require_current,
    split_statements,
    version,
)
from holdfast.store.migration_plan import Migration
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.repeatable import repeatables
from holdfast.store.sql_entries import Dialect
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.store import Store, connect, open_store
from tests.conftest import database_url, drop
from tests.support.store_harness import StoreHarness

SCHEMAS = Path(__file__).parent / "schema"
JOB_RECORD = (
    "id tenant kind queue capability lane lane_position status gate priority labels runner spec inputs held "
    "dismissed attempts max_attempts attempt requested_at available_at started_at finished_at updated_at owner "
    "token lease_expires_at orphaned_at phase domain stop_kind stop_phase stop_deadline_at exit_code "
    "error_code error_message result progress usage seq policy reuse_key signature"
)
"""The first columns of the view of jobs, as they were released."""


@pytest.fixture
async def empty_url(kind: str, tmp_path: Path, server: str) -> Any:
    """A database without a schema."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    name = f"holdfast_empty_{os.getpid()}"
    admin = await asyncpg.connect(server)
    await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    await admin.execute(f"CREATE DATABASE {name}")
    await admin.close()
    yield database_url(server, name)
    await drop(server, name)


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
    numbered = [step.number for step in applied if isinstance(step, Migration)]
    assert numbered == list(range(1, len(numbered) + 1))
    assert applied[len(numbered) :] == repeatables(dialect_of(database))
    before = await dumped(database)
    assert await migrate(database) == []
    assert await dumped(database) == before
    assert await version(database) == len(numbered)
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
    every = migrations(dialect_of(database))
    for migration in every:
        applied = await migrate(database, upto=migration.number)
        assert applied[0] == migration
        assert applied[1:] == (repeatables(dialect_of(database)) if migration == every[-1] else [])
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


NEWER = "INSERT INTO holdfast.migrations VALUES (999, 'future', {now}, 'checksum', {oldest})"


async def add_newer_migration(database: SqliteDatabase | PostgresDatabase, oldest: int) -> None:
    now = "1" if isinstance(database, SqliteDatabase) else "now()"
    await run_sql(database, NEWER.format(now=now, oldest=oldest))


async def test_newer_schema_is_refused_with_the_way_out(empty_url: str) -> None:
    """Proves O2."""
    database = await connect(empty_url, listen=False)
    await migrate(database)
    await add_newer_migration(database, oldest=999)
    for work in (migrate, pending, require_current):
        with pytest.raises(SchemaMismatch, match=r"newer than this holdfast knows .*upgrade holdfast"):
            await work(database)
    await database.close()


async def test_newer_schema_that_still_fits_is_used_and_left_alone(empty_url: str) -> None:
    """During a rolling upgrade the old processes go on, and new ones of the old version start. Proves O2."""
    database = await connect(empty_url, listen=False)
    await migrate(database)
    await add_newer_migration(database, oldest=1)
    newer = "UPDATE holdfast.repeatables SET revision = 99, checksum = 'another' WHERE file = 'job_views'"
    await run_sql(database, newer)
    before = await dumped(database)
    await require_current(database)
    assert await pending(database) == await migrate(database) == []
    assert await dumped(database) == before
    await database.close()
    async with await open_store(empty_url, listen=False) as store:
        job = await store.jobs.submit({"runner": "process", "spec": {"command": ["true"]}})
        assert (await store.jobs.get(job.id)).status == "queued"


@pytest.mark.parametrize("difference", ["name = 'another'", "checksum = 'another'"])
async def test_database_with_another_migration_of_a_number_is_refused(empty_url: str, difference: str) -> None:
    """Its schema is not known, whatever its version. Proves O2."""
    database = await connect(empty_url, listen=False)
    await migrate(database)
    await run_sql(database, f"UPDATE holdfast.migrations SET {difference} WHERE number = 1")
    for work in (migrate, pending, require_current):
        with pytest.raises(SchemaMismatch, match=r"migration 0001 \w+ of the database is not this"):
            await work(database)
    await database.close()


async def run_sql(database: Any, sql: str) -> None:
    if isinstance(database, SqliteDatabase):
        await database.migrate(methodcaller("execute", sql.replace("holdfast.", "")))
    else:
        await database.fetch(sql)


async def test_changed_view_or_function_is_noticed_and_applied_again(empty_url: str) -> None:
    """A database whose files are from an older holdfast. Proves O2."""
    database = await connect(empty_url, listen=False)
    await migrate(database)
    before = await dumped(database)
    await run_sql(database, "DROP VIEW holdfast.job_events")
    await run_sql(database, "UPDATE holdfast.repeatables SET checksum = 'another' WHERE file = 'job_views'")
    with pytest.raises(SchemaMismatch, match="not those of this holdfast: run `holdfast migrate`"):
        await require_current(database)
    assert await pending(database) == repeatables(dialect_of(database))
    assert await migrate(database) == repeatables(dialect_of(database))
    await require_current(database)
    assert await dumped(database) == before
    await database.close()


@pytest.mark.parametrize(
    "newer",
    [
        "UPDATE holdfast.repeatables SET revision = 99, oldest = 99, checksum = 'another' WHERE file = 'job_views'",
        "UPDATE holdfast.repeatables SET file = 'unheard_of' WHERE file = 'job_views'",
    ],
)
async def test_older_holdfast_leaves_newer_functions_alone(empty_url: str, newer: str) -> None:
    """Proves O2."""
    database = await connect(empty_url, listen=False)
    await migrate(database)
    await run_sql(database, newer)
    await run_sql(database, "DROP VIEW holdfast.job_events")
    before = await dumped(database)
    for work in (migrate, pending, require_current):
        with pytest.raises(SchemaMismatch, match="newer than this holdfast can use: upgrade holdfast"):
            await work(database)
    assert await dumped(database) == before
    await database.close()


async def test_numbered_migration_is_followed_by_all_repeatable_files(empty_url: str) -> None:
    """It may have dropped a view that its own change required it to drop. Proves O2."""
    database = await connect(empty_url, listen=False)
    last = migrations(dialect_of(database))[-1]
    await migrate(database, upto=last.number - 1)
    assert await migrate(database) == [last, *repeatables(dialect_of(database))]
    await require_current(database)
    async with Store(database) as store:
        job = await store.jobs.submit({"runner": "process", "spec": {"command": ["true"]}})
        assert len((await store.events.page(job.id)).items) == 1


def test_changed_repeatable_file_has_another_revision() -> None:
    """A released revision never changes: an older holdfast is told from a newer one by it."""
    assert {file.name for file in revisions.stale()} == set(), "`make schema` raises the revision in the first line"
    dialects: tuple[Dialect, ...] = ("postgres", "sqlite")
    found = [f"{d} {one.name} {one.revision} {one.checksum}" for d in dialects for one in repeatables(d)]
    if os.environ.get("HOLDFAST_WRITE_SCHEMA"):
        revisions.RECORDED.write_text("\n".join(found) + "\n")
    assert found == revisions.RECORDED.read_text().splitlines(), "`make schema` records the new revision"


def test_changed_text_under_its_recorded_revision_is_found_and_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both for a file of both dialects and for one of Postgres."""
    lines = revisions.RECORDED.read_text().splitlines()
    changed = [line[:-1] + "x" if line.startswith(("sqlite job_views", "postgres submit ")) else line for line in lines]
    (tmp_path / "recorded.txt").write_text("\n".join(changed))
    shutil.copytree(revisions.FILES, tmp_path / "files")
    before = revisions.recorded()
    monkeypatch.setattr(revisions, "RECORDED", tmp_path / "recorded.txt")
    monkeypatch.setattr(revisions, "FILES", tmp_path / "files")
    revisions.write()
    firsts = [
        (tmp_path / "files" / file).read_text().splitlines()[0] for file in ("job_views.sql", "postgres/submit.sql")
    ]
    raised = [before["sqlite", "job_views"][0] + 1, before["postgres", "submit"][0] + 1]
    assert firsts == [f"-- revision: {revision}" for revision in raised]


FROZEN = Path(__file__).parent / "schema" / "migrations.txt"


def test_released_migration_never_changes() -> None:
    """Databases that have it would differ from new ones. `make schema` adds the lines of new migrations only."""
    dialects: tuple[Dialect, ...] = ("postgres", "sqlite")
    found = {f"{d} {one.label}": one.checksum for d in dialects for one in migrations(d)}
    frozen = dict(line.rsplit(" ", 1) for line in FROZEN.read_text().splitlines())
    if os.environ.get("HOLDFAST_WRITE_SCHEMA"):
        frozen = {**found, **frozen}
        FROZEN.write_text("".join(f"{name} {checksum}\n" for name, checksum in sorted(frozen.items())))
    assert found == frozen, "a released migration stays as it is: add another one, then `make schema`"


def test_each_later_migration_names_the_oldest_version_that_may_still_run() -> None:
    dialects: tuple[Dialect, ...] = ("postgres", "sqlite")
    for dialect in dialects:
        assert all(1 <= one.oldest <= one.number for one in migrations(dialect))
    with pytest.raises(ValueError, match="the first line of migration 0002 more is not `-- oldest: n`"):
        _ = Migration(2, "more", "CREATE TABLE more (n integer);").oldest


def test_repeatable_files_hold_no_data() -> None:
    """They are applied again and again."""
    dialects: tuple[Dialect, ...] = ("postgres", "sqlite")
    for dialect in dialects:
        for one in repeatables(dialect):
            made = set(re.findall(r"^(?:CREATE(?: OR REPLACE)?|ALTER|DROP) (\w+)", one.sql, re.MULTILINE))
            assert made <= {"VIEW", "FUNCTION", "TRIGGER"}, one.name


def test_views_keep_the_columns_that_they_had_and_their_order() -> None:
    """Postgres replaces a view only if its first columns stay; a fresh database would not notice."""
    (views,) = (one for one in repeatables("postgres") if one.name == "job_views")
    found = re.search(r"VIEW holdfast.job_records AS\nSELECT\n(.*?)\nFROM", views.sql, re.DOTALL)
    assert found is not None
    names = " ".join(re.split(r"\.| AS ", column.strip())[-1] for column in found[1].split(","))
    assert names.startswith(JOB_RECORD)


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
    assert "would apply 0001 schema" in planned.stdout
    assert "CREATE TABLE" in planned.stdout
    assert "would apply 0001 schema" in holdfast("migrate", "--dry-run", HOLDFAST_DATABASE_URL=empty_url).stdout
    done = holdfast("migrate", HOLDFAST_DATABASE_URL=empty_url)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "applied 0001 schema")
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
