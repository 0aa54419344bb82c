"""A store full of jobs in mixed states, millions of them, made by plain SQL because that is quick."""

import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

COLUMNS = """
  id, tenant, queue, capability, lane, lane_position, priority, status, gate, requested_at, available_at, started_at,
  finished_at, updated_at, owner, token, lease_expires_at, attempt, phase, worker, domain, claimed_at, claim_seq,
  max_attempts, seq
"""
# One row per kind of job: how many, and what differs. {n} is its number, {now} a time, {later} one in the future.
QUEUED = {"status": "'queued'", "gate": "'open'"}
FUTURE = {"status": "'queued'", "gate": "'future'", "available_at": "{later}"}
LANED = {"status": "'queued'", "gate": "'lane'", "lane": "'lane-' || ({n} % 1000)", "lane_position": "{n}"}
ENDED = {"status": "'succeeded'", "started_at": "{now}", "finished_at": "{now}", "attempt": "1", "seq": "3"}
FAILED = {**ENDED, "status": "'failed'"}
RUNNING = {
    "status": "'running'",
    "started_at": "{now}",
    "owner": "'w' || ({n} % 7)",
    "lease_expires_at": "{later}",
    "attempt": "1",
    "phase": "'started'",
    "worker": "'w' || ({n} % 7)",
    "domain": "'function'",
    "claimed_at": "{now}",
    "claim_seq": "2",
    "token": "1",
    "seq": "2",
}
DEFAULTS = {
    **dict.fromkeys(name.strip() for name in COLUMNS.split(",")),
    "tenant": "'tenant-' || ({n} % 1000)",
    "queue": "'default'",
    "capability": "'function:f'",
    "priority": "0",
    "requested_at": "{now}",
    "available_at": "{now}",
    "updated_at": "{now}",
    "token": "0",
    "attempt": "0",
    "max_attempts": "1",
    "seq": "1",
}
DUE = {**QUEUED, "tenant": "'default'"}
MIXED = [(25_000, LANED), (75_000, FUTURE), (10_000, RUNNING), (25_000, FAILED), (65_000, ENDED), (500, DUE)]
"""About 200,000 jobs; 500 of them are claimable by tenant `default`."""


def _selects(kinds: list[tuple[int, dict[str, str]]], **times: str) -> Iterator[tuple[int, str]]:
    """Yield for each kind its number of jobs, and the values of the columns after the id."""
    for count, kind in kinds:
        values = {**DEFAULTS, **kind}
        columns = [name.strip() for name in COLUMNS.split(",")][1:]
        yield count, ", ".join((values[name] or "NULL").format(n="n", **times) for name in columns)


async def fill_postgres(connection: Any, kinds: list[tuple[int, dict[str, str]]] = MIXED) -> None:
    """Insert jobs of these kinds, in this order, with their specs."""
    for count, values in _selects(kinds, now="now()", later="now() + interval '1 day'"):
        await connection.execute(
            f"INSERT INTO holdfast.jobs ({COLUMNS}) "
            f"SELECT holdfast.new_id(), {values} FROM generate_series(1, {count}) AS n"
        )
    await connection.execute(
        "INSERT INTO holdfast.specs (id, tenant, kind, requested_at, runner, spec, inputs, signature) "
        "SELECT j.id, j.tenant, 'run', j.requested_at, 'function', '{\"name\": \"f\"}', '{}', j.id "
        "FROM holdfast.jobs AS j "
        "WHERE NOT EXISTS (SELECT 1 FROM holdfast.specs AS s WHERE s.id = j.id)"
    )
    await connection.execute("VACUUM ANALYZE holdfast.jobs")
    await connection.execute("VACUUM ANALYZE holdfast.specs")


def fill_sqlite(
    connection: sqlite3.Connection, new_id: Callable[[], str], kinds: list[tuple[int, dict[str, str]]] = MIXED
) -> None:
    """The same on SQLite."""
    connection.create_function("new_id", 0, new_id)
    now = "CAST(strftime('%s', 'now') AS INTEGER) * 1000000"
    connection.execute("BEGIN")
    for count, values in _selects(kinds, now=now, later=f"{now} + 86400000000"):
        connection.execute(
            f"WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count}) "
            f"INSERT INTO jobs ({COLUMNS}) SELECT new_id(), {values} FROM numbers"
        )
    connection.execute(
        "INSERT INTO specs (id, tenant, kind, requested_at, runner, spec, inputs, signature) "
        "SELECT j.id, j.tenant, 'run', j.requested_at, 'function', '{\"name\": \"f\"}', '{}', j.id FROM jobs AS j "
        "WHERE j.id NOT IN (SELECT id FROM specs)"
    )
    connection.execute("COMMIT")
