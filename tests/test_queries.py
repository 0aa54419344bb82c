"""The SQL files: equal names and parameters, every statement fits the schema, and the claim reads its index."""

import json
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.store import queries
from holdfast.store.migrate import migrate
from holdfast.store.postgres import SESSION, prepare
from holdfast.store.sqlite import Connection, SqliteDatabase
from holdfast.store.store import Store, connect
from holdfast.timing import SystemClock
from tests.conftest import clone, drop
from tests.scenario import fill_postgres, fill_sqlite

PAIRS = json.dumps([{"queue": "default", "capability": "function:f", "domain": "function"}])


def test_both_dialects_have_the_same_statements_with_the_same_parameters() -> None:
    postgres, sqlite = queries.load("postgres"), queries.load("sqlite")
    assert sorted(postgres) == sorted(sqlite)
    for name, query in postgres.items():
        assert query.parameters == sqlite[name].parameters, name


def test_each_noun_has_a_file_in_both_dialects() -> None:
    folder = Path(queries.__file__).parent / "sql"
    names = {dialect: {file.name for file in (folder / dialect).glob("*.sql")} for dialect in ("postgres", "sqlite")}
    assert names["sqlite"] - {"session.sql"} == names["postgres"]


def test_every_update_of_a_running_job_by_its_owner_is_fenced_by_the_token() -> None:
    """Proves L4."""
    fenced = ("start", "beat", "advance_stop", "finish", "hand_over", "append_events")
    dialects: tuple[queries.Dialect, ...] = ("postgres", "sqlite")
    for dialect in dialects:
        loaded = queries.load(dialect)
        for name in fenced:
            text = " ".join(statement.text for statement in loaded[name].statements)
            assert "token = " in text, (dialect, name)


async def test_every_statement_can_be_prepared_on_postgres(process_database: str) -> None:
    connection = await asyncpg.connect(process_database)
    for name, statement in prepare("holdfast").items():
        prepared = await connection.prepare(statement.text)
        assert len(prepared.get_parameters()) == len(statement.parameters), name
    await connection.close()


async def test_every_statement_can_be_prepared_on_sqlite(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "store.db")
    await migrate(database)
    await database.close()
    connection = Connection(tmp_path / "store.db", SystemClock(), writes=True)
    for query in queries.load("sqlite").values():
        for statement in query.statements:
            values = [None] * len(statement.parameters)
            given = values if statement.each else dict(zip(statement.parameters, values, strict=True))
            connection.raw.execute("EXPLAIN " + statement.text, given)
    connection.raw.close()


async def test_schema_may_have_another_name(server: str) -> None:
    url = await clone(server, "holdfast_other_schema")
    connection = await asyncpg.connect(url)
    await connection.execute("DROP SCHEMA holdfast CASCADE; CREATE SCHEMA other")
    await connection.close()
    database = await connect(url, schema="other", listen=False)
    await migrate(database)
    async with Store(database) as store:
        job = await store.jobs.submit({"runner": "process", "spec": {"command": ["true"]}, "lane": "L"})
        assert (await store.jobs.get(job.id)).gate == "open"
        rows = await store.database.fetch("SELECT nspname FROM pg_namespace WHERE nspname = 'holdfast'")  # type: ignore[union-attr]
        assert list(rows) == []
    await drop(server, "holdfast_other_schema")


@pytest.mark.parametrize("plan_cache_mode", ["force_generic_plan", "force_custom_plan"])
async def test_claim_reads_its_partial_index_on_postgres_among_200_000_jobs(server: str, plan_cache_mode: str) -> None:
    """Proves N4."""
    url = await clone(server, "holdfast_plans")
    connection = await asyncpg.connect(url, server_settings={**SESSION, "plan_cache_mode": plan_cache_mode})
    await fill_postgres(connection, 200_000)
    claim = prepare("holdfast")["claim"]
    values = {"worker": "w1", "pairs": PAIRS, "slots": 100, "ttl": 60.0}
    explain = "EXPLAIN (FORMAT JSON, ANALYZE, BUFFERS) " + claim.text
    async with connection.transaction():
        answer = await connection.fetchval(explain, *[values[name] for name in claim.parameters])
    nodes = list(plan_nodes(json.loads(answer)[0]["Plan"]))
    scans = {node["Index Name"] for node in nodes if node.get("Relation Name") == "jobs" and "Index Name" in node}
    assert scans == {"jobs_claimable", "jobs_pkey"}
    assert not [node for node in nodes if node["Node Type"] == "Seq Scan" and node.get("Relation Name") == "jobs"]
    for node in nodes:
        if node.get("Index Name") == "jobs_claimable":
            assert node["Actual Rows"] <= 100
    await connection.close()
    await drop(server, "holdfast_plans")


def plan_nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    children = plan.get("Plans", [])
    return [plan, *(node for child in children for node in plan_nodes(child))]


async def test_claim_reads_its_partial_index_on_sqlite_among_200_000_jobs(tmp_path: Path) -> None:
    """Proves N4."""
    path = tmp_path / "store.db"
    database = SqliteDatabase(path)
    await migrate(database)
    await database.close()
    connection = Connection(path, SystemClock(), writes=True)
    fill_sqlite(connection.raw, 200_000)
    connection.raw.execute("INSERT INTO lines VALUES ('default', 'function:f', 'function', 'default')")
    values = {"worker": "w1", "pairs": PAIRS, "slots": 100, "ttl": 60.0}
    for statement in queries.load("sqlite")["claim"].statements:
        given = {name: values[name] for name in statement.parameters}
        plan = [row[3] for row in connection.raw.execute("EXPLAIN QUERY PLAN " + statement.text, given)]
        on_jobs = [line for line in plan if line.startswith(("SCAN j", "SCAN h ", "SCAN c ", "SEARCH j", "SEARCH h "))]
        for line in on_jobs:
            assert line.startswith("SEARCH"), plan
            assert "jobs_claimable" in line or "(id=?)" in line or "(rowid=?)" in line, plan
    connection.raw.close()
