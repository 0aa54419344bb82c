"""The SQL files: equal names and parameters, every statement fits the schema, and the claim reads its index."""

import re
from pathlib import Path

import asyncpg
import pytest

from holdfast.model import FUNCTION_DOMAIN, new_id
from holdfast.store import queries
from holdfast.store.migrate import migrate
from holdfast.store.postgres import SESSION
from holdfast.store.postgres_parameters import prepare
from holdfast.store.sql_entries import Dialect, entries
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.store import Store, connect
from tests.conftest import clone, drop
from tests.support.bulk_data import DUE, ENDED, MIXED, fill_postgres, fill_sqlite
from tests.support.query_plans import plan_of, sqlite_connection, sqlite_explain

DIALECTS: tuple[Dialect, ...] = ("postgres", "sqlite")
LINE = {
    "n": 0,
    "tenant_n": 0,
    "tenant": "default",
    "queue": "default",
    "capability": "function:f",
    "domain": "function",
    "share": 100,
    "merge": False,
    "after_id": None,
    "slack": 0.0,
}
TAKE = {
    "worker": "w1",
    "lines": [LINE],
    "slots": 100,
    "ttl": 60.0,
    "function": FUNCTION_DOMAIN,
    "capped": False,
    "alone": True,
}
ADOPT = {"worker": "w1", "domains": ["function"], "limit": 100, "ttl": 60.0}
TENANTS = {
    "pairs": [{"queue": "default", "capability": "function:f"}],
    "last_tenant": "default",
    "limit": 100,
    "capped": False,
}


def test_both_dialects_have_the_same_statements_with_the_same_parameters() -> None:
    postgres, sqlite = queries.load("postgres"), queries.load("sqlite")
    # Postgres accepts jobs in its SQL function.
    own = {entry.name for entry in entries() if entry.file == "submit.sql"}
    assert set(postgres) - own == set(sqlite) - own
    for name in set(postgres) - own:
        assert postgres[name].parameters == sqlite[name].parameters, name


def test_every_update_of_a_running_job_by_its_owner_is_fenced_by_the_token() -> None:
    """Proves L4."""
    fenced = ("start", "beat", "advance_stop", "finish", "hand_over", "append_events", "lock_lease")
    for dialect in DIALECTS:
        loaded = queries.load(dialect)
        for name in fenced:
            text = " ".join(statement.text for statement in loaded[name].statements)
            assert "token = " in text, (dialect, name)


async def test_every_statement_can_be_prepared_on_postgres(process_database: str) -> None:
    connection = await asyncpg.connect(process_database)
    for name, statement in prepare("holdfast").items():
        prepared = await connection.prepare(statement.text)
        assert len(prepared.get_parameters()) == len(statement.slots), name
    await connection.close()


async def test_every_statement_can_be_prepared_on_sqlite(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "store.db")
    await migrate(database)
    await database.close()
    with sqlite_connection(tmp_path / "store.db", writes=True) as connection:
        for query in queries.load("sqlite").values():
            for statement in query.statements:
                sqlite_explain(connection, statement, how="EXPLAIN")


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


FINISH = {"rows": [{"id": new_id(), "token": 1, "status": "succeeded", "cause": "exit", "delay": 0.0}]}
INDEXES = {
    "adopt": {"jobs_orphaned", "jobs_pkey"},
    "tenants_with_work": {"jobs_claimable"},
    "take": {"jobs_claimable", "jobs_pkey"},
    "finish": {"jobs_pkey"},
}


@pytest.mark.parametrize("plan_cache_mode", ["force_generic_plan", "force_custom_plan"])
async def test_claim_and_finish_read_their_indexes_on_postgres_among_200_000_jobs(
    server: str, plan_cache_mode: str
) -> None:
    """Proves N4."""
    name = f"holdfast_{plan_cache_mode}"
    url = await clone(server, name)
    connection = await asyncpg.connect(url, server_settings={**SESSION, "plan_cache_mode": plan_cache_mode})
    await fill_postgres(connection)
    merging = {**TAKE, "lines": [{**LINE, "merge": True}, {**LINE, "n": 1, "capability": "function:g", "merge": True}]}
    hots = (("adopt", ADOPT), ("tenants_with_work", TENANTS), ("take", TAKE), ("take", merging), ("finish", FINISH))
    for hot, values in hots:
        nodes = [node for node in await plan_of(connection, hot, values) if node.get("Relation Name") == "jobs"]
        assert {node["Index Name"] for node in nodes if "Index Name" in node} == INDEXES[hot]
        assert not [node for node in nodes if node["Node Type"] == "Seq Scan"]
        assert all(node["Actual Rows"] <= 100 for node in nodes if node.get("Index Name") == "jobs_claimable")
    await connection.close()
    await drop(server, name)


async def test_finish_locks_in_the_order_of_ids_also_when_planned_on_an_empty_store(server: str) -> None:
    """Proves L20."""
    url = await clone(server, "holdfast_empty_plan")
    connection = await asyncpg.connect(url, server_settings=SESSION)
    nodes = await plan_of(connection, "finish", FINISH, run=False)
    assert {node["Index Name"] for node in nodes if node.get("Relation Name") == "jobs" and "Index Name" in node} == {
        "jobs_pkey"
    }
    await connection.close()
    await drop(server, "holdfast_empty_plan")


CLAIM = ("adopt", "tenants_with_work", "take")


@pytest.mark.parametrize("name", [*CLAIM, "finish", "beat", "start", "hand_over", "append_events", "move", "reap"])
async def test_hot_statements_read_their_indexes_on_sqlite_among_200_000_jobs(tmp_path: Path, name: str) -> None:
    """Proves N4."""
    path = tmp_path / "store.db"
    database = SqliteDatabase(path)
    await migrate(database)
    await database.close()
    with sqlite_connection(path, writes=True) as connection:
        fill_sqlite(connection.raw, new_id, MIXED if name in CLAIM else [(2_000, DUE), (20_000, ENDED)])
        connection.raw.execute("INSERT INTO lines VALUES (0, 'default', 'default', 'function:f', 'function', 100)")
        statements = queries.load("sqlite")[name].statements
        plans = [(statement, sqlite_explain(connection, statement)) for statement in statements]
    for statement, plan in plans:
        reads = [line for line in plan if re.match(r"(SCAN|SEARCH) (jobs|[a-z])\b", line) and "USING" in line]
        scans = [line for line in plan if re.match(r"SCAN \w+", line) and not line.endswith("USING INDEX jobs_leased")]
        assert not [line for line in scans if line.split()[1] in tables(statement.text)], plan
        if name in CLAIM:
            assert all(
                re.search(r"jobs_claimable|jobs_orphaned|jobs_running|rowid=|id=\?|queue=\?|PRIMARY", line)
                for line in reads
            ), plan


def tables(text: str) -> set[str]:
    """The names under which a statement reads the big tables."""
    return {"jobs"} | set(re.findall(r"\b(?:jobs|events|attempts|specs) AS (\w+)", text))
