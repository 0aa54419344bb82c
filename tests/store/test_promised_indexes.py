"""The comment over a statement says which indexes it uses; the database must agree, and use none that grows for ever.

SQLite plans by the schema alone. Postgres is asked for the generic plan that our sessions run, among many jobs.
"""

import re
from pathlib import Path

import asyncpg

from holdfast.store import queries
from holdfast.store.migrate import migrate
from holdfast.store.postgres import SESSION
from holdfast.store.postgres_parameters import prepare
from holdfast.store.sql_entries import Dialect, texts
from holdfast.store.sqlite import SqliteDatabase
from tests.conftest import clone, drop
from tests.support.bulk_data import fill_postgres
from tests.support.query_plans import generic_plan, sqlite_connection, sqlite_explain

OF_LISTS = frozenset({"jobs_waiting", "jobs_ended", "jobs_of_lane", "specs_of_kind", "labels_listed"})
"""Indexes of all jobs that there ever were, or that wait; only a list walks along them, a page at a time."""
LISTS = frozenset({"list_jobs", "list_ranges", "waiting_depths"})
"""What may: lists, and the count of all that waits, which a server makes in the background when there is much."""
BIG = frozenset({"jobs", "specs", "events", "attempts", "needs", "labels", "tasks"})
PARTIAL = "SELECT c.relname FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid WHERE i.indpred IS NOT NULL"
NAME = re.compile(r"\b[a-z]+_[a-z_]+\b")


def promised(dialect: Dialect) -> dict[str, frozenset[str]]:
    """Return the indexes that the comment of each statement names after the word Uses."""
    found = {}
    for name, body in texts(dialect).items():
        comment = " ".join(line.removeprefix("-- ") for line in body.splitlines() if line.startswith("-- "))
        found[name] = frozenset(
            index for said in re.findall(r"\bUses ([^.:]*)", comment) for index in NAME.findall(said)
        )
    return found


async def sqlite_plans(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """For each statement's parts, the text and the plan."""
    database = SqliteDatabase(folder / "store.db")
    await migrate(database)
    await database.close()
    with sqlite_connection(folder / "store.db", writes=True) as connection:
        return {
            query.name: [(part.text, "\n".join(sqlite_explain(connection, part))) for part in query.statements]
            for query in queries.load("sqlite").values()
        }


KEYS = frozenset({"jobs_pkey", "events_pkey", "attempts_pkey", "lanes_pkey", "snapshots_folder", "tokens_hash"})
"""Keys, which SQLite calls otherwise."""


async def test_statements_use_the_indexes_that_they_promise_on_sqlite(tmp_path: Path) -> None:
    """Proves N4."""
    plans = {name: "\n".join(plan for _, plan in parts) for name, parts in (await sqlite_plans(tmp_path)).items()}
    missing = {
        (name, index)
        for name, indexes in promised("sqlite").items()
        for index in indexes
        if index not in plans[name] and not (index in KEYS and re.search(r"PRIMARY KEY|sqlite_autoindex", plans[name]))
    }
    assert not missing, "\n".join(f"{name} promises {index}:\n{plans[name]}" for name, index in sorted(missing))


async def test_only_list_statements_scan_the_list_indexes_on_sqlite(tmp_path: Path) -> None:
    """A look for little work must not read all jobs that there are."""
    plans = await sqlite_plans(tmp_path)
    walks = [
        (name, line)
        for name, parts in plans.items()
        for text, plan in parts
        for line in plan.splitlines()
        if reads_all(line, text) or (name not in LISTS and OF_LISTS & set(NAME.findall(line)))
    ]
    assert walks == []


def reads_all(line: str, text: str) -> bool:
    """Whether a line of a plan says that a big table is read from end to end."""
    scan = re.fullmatch(r"SCAN (\w+)(?: USING (?:COVERING )?INDEX sqlite_autoindex_\w+)?", line)
    aliases = {table: set(re.findall(rf"\b{table} AS (\w+)", text)) for table in BIG}
    return scan is not None and any(scan[1] in {table, *names} for table, names in aliases.items())


async def test_statements_keep_the_same_promises_on_postgres_among_200_000_jobs(server: str) -> None:
    """Proves N4."""
    url = await clone(server, "holdfast_promises")
    connection = await asyncpg.connect(url, server_settings=SESSION)
    await fill_postgres(connection)
    await connection.execute(
        "INSERT INTO holdfast.snapshots SELECT 'id' || n, 'default', 'parent' || n, 'task', 'hash', '{}', 'f' || n,"
        " 'digest', n, now(), now() - n * interval '1 minute', holdfast.new_id(), 1 FROM generate_series(1, 10000) AS n"
    )
    await connection.execute("ANALYZE holdfast.snapshots")
    partial = {row[0] for row in await connection.fetch(PARTIAL)}
    used, whole = {}, []
    for name in prepare("holdfast"):
        nodes = await generic_plan(connection, name)
        used[name] = {node["Index Name"] for node in nodes if "Index Name" in node}
        scans = [node for node in nodes if node.get("Relation Name") in BIG and node["Node Type"].endswith("Scan")]
        reads = [node for node in scans if {"Index Cond", "TID Cond"}.isdisjoint(node)]
        whole += [(name, index) for node in reads if (index := node.get("Index Name", "none")) not in partial]
    await connection.close()
    await drop(server, "holdfast_promises")
    missing = {name: indexes - used[name] for name, indexes in promised("postgres").items()}
    assert {name: indexes for name, indexes in missing.items() if indexes} == {}
    assert {name: found for name, found in used.items() if name not in LISTS and found & OF_LISTS} == {}
    assert whole == []
