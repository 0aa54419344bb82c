"""A store full of jobs in mixed states, made by plain SQL because that is quick."""

import sqlite3
from typing import Any

STATES = """
  CASE n % 8 WHEN 0 THEN 'queued' WHEN 1 THEN 'queued' WHEN 2 THEN 'running' WHEN 3 THEN 'failed'
    WHEN 4 THEN 'cancelled' ELSE 'succeeded' END AS status,
  CASE n % 8 WHEN 0 THEN CASE n % 5 WHEN 0 THEN 'open' WHEN 1 THEN 'lane' ELSE 'future' END
    WHEN 1 THEN 'future' END AS gate
"""
COLUMNS = """
  id, tenant, queue, capability, lane, lane_position, priority, status, gate, requested_at, available_at, started_at,
  finished_at, updated_at, owner, token, lease_expires_at, attempt, phase, worker, domain, claimed_at, max_attempts, seq
"""
VALUES = """
  'tenant-' || (n % 10), 'queue-' || (n % 4), 'function:f', CASE WHEN gate = 'lane' THEN 'lane-' || (n % 50) END, n,
  n % 3, status, gate, {now}, {now}, CASE WHEN gate IS NULL THEN {now} END,
  CASE WHEN status IN ('failed', 'cancelled', 'succeeded') THEN {now} END, {now},
  CASE WHEN status = 'running' THEN 'w' || (n % 7) END, 1, CASE WHEN status = 'running' THEN {now} END, 1,
  CASE WHEN status = 'running' THEN 'started' END, 'w' || (n % 7), 'function', {now}, 1, 2
"""
DUE = "queue = 'default', tenant = 'default', capability = 'function:f'"


async def fill_postgres(connection: Any, count: int) -> None:
    """Insert `count` jobs of all states; a few hundred of them are claimable in queue `default`."""
    await connection.execute(
        f"INSERT INTO holdfast.jobs ({COLUMNS}) "
        f"SELECT gen_random_uuid(), {VALUES.format(now='now()')} "
        f"FROM (SELECT n, {STATES} FROM generate_series(1, {count}) AS n) AS made"
    )
    await connection.execute(f"UPDATE holdfast.jobs SET {DUE} WHERE gate = 'open' AND lane_position < 20000")
    await connection.execute(
        "INSERT INTO holdfast.specs (id, tenant, kind, requested_at, runner, spec, inputs) "
        "SELECT id, tenant, 'run', requested_at, 'function', '{\"name\": \"f\"}', '{}' FROM holdfast.jobs"
    )
    await connection.execute("ANALYZE holdfast.jobs; ANALYZE holdfast.specs")


def fill_sqlite(connection: sqlite3.Connection, count: int) -> None:
    """The same on SQLite."""
    connection.execute("BEGIN")
    connection.execute(
        f"WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count}) "
        f"INSERT INTO jobs ({COLUMNS}) SELECT printf('%032x', n), {VALUES.format(now='5')} "
        f"FROM (SELECT n, {STATES} FROM numbers)"
    )
    connection.execute(f"UPDATE jobs SET {DUE} WHERE gate = 'open' AND lane_position < 20000")
    connection.execute("COMMIT")
