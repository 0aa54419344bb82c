"""Run a race, and check the whole record afterwards."""

import asyncio
import os
import sqlite3
from collections.abc import Sequence
from typing import Any

import asyncpg

from holdfast.store import open_store
from holdfast.store.store import sqlite_path
from tests.support.race_processes import Call, RaceProcesses, Report

PROCESSES = 8
# Rounds of the two great races; `make test-races` runs 10,000 of each.
ROUNDS = int(os.environ.get("HOLDFAST_TEST_ROUNDS", "1500"))
PATIENCE = 200 + ROUNDS / 5
# A transaction that takes this long between its statements lets dozens of others in.
SLOW = 0.004


async def select(url: str, sql: str) -> list[tuple[Any, ...]]:
    """Run one SELECT on either database."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(sqlite_path(url))
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()
    postgres = await asyncpg.connect(url, server_settings={"search_path": "holdfast"})
    try:
        return [
            tuple(str(v) if isinstance(v, asyncpg.pgproto.pgproto.UUID) else v for v in row.values())
            for row in await postgres.fetch(sql)
        ]
    finally:
        await postgres.close()


def seconds(default: float) -> float:
    """How long an open-ended race runs."""
    return float(os.environ.get("HOLDFAST_TEST_SECONDS", default))


async def race(race_processes: RaceProcesses, url: str, calls: Sequence[Call], *, within: float = 200.0) -> list[Any]:
    """Race, and see that no deadlock and no repair was needed; return the racers' values."""
    reports: list[Report] = await asyncio.to_thread(race_processes.race, url, calls, seconds=within)
    assert sum(report.deadlocks for report in reports) == 0
    assert sum(report.gate_repairs for report in reports) == 0
    return [report.value for report in reports]


async def statuses(url: str) -> dict[str, str]:
    return {str(job): status for job, status in await select(url, "SELECT id, status FROM jobs")}


async def assert_sound(url: str) -> None:
    """Check the whole record: no stuck gate, no gap in a history, true last status events, one job per lane."""
    async with await open_store(url, listen=False) as store:
        assert [dict(row) for row in await store.database.read("stuck_gates", limit=10)] == []
    assert await select(url, "SELECT id, lane FROM jobs WHERE gate = 'unresolved' OR unsettled") == []
    gaps = """
        SELECT j.id, j.seq, e.n, e.first, e.last FROM jobs AS j
        LEFT JOIN (
          SELECT job_id, count(*) AS n, min(seq) AS first, max(seq) AS last FROM job_events GROUP BY job_id) AS e
          ON e.job_id = j.id
        WHERE e.n IS NULL OR e.first <> 1 OR e.last <> e.n OR e.last <> j.seq"""
    assert await select(url, gaps) == []
    untrue = """
        SELECT j.id, j.status, e.data ->> 'status' FROM jobs AS j
        JOIN (SELECT job_id, max(seq) AS seq FROM job_events WHERE type = 'status' GROUP BY job_id) AS l
        ON l.job_id = j.id
        JOIN job_events AS e ON e.job_id = l.job_id AND e.seq = l.seq
        WHERE e.data ->> 'status' <> j.status"""
    assert await select(url, untrue) == []
    await assert_lanes_single(url)


async def assert_lanes_single(url: str) -> None:
    """By the ledger, no two attempts of a lane overlapped."""
    spans = """
        SELECT j.tenant, j.lane, a.claimed_at, a.ended_at, j.id
        FROM attempts AS a JOIN jobs AS j ON j.id = a.job_id WHERE j.lane IS NOT NULL
        UNION ALL
        SELECT j.tenant, j.lane, j.claimed_at, NULL, j.id
        FROM jobs AS j WHERE j.lane IS NOT NULL AND j.phase IS NOT NULL
        ORDER BY 1, 2, 3"""
    last: tuple[Any, ...] | None = None
    for span in await select(url, spans):
        if last is not None and last[:2] == span[:2]:
            assert last[3] is not None, f"{span} began while {last} was open"
            assert last[3] <= span[2], f"{span} began before {last} ended"
        last = span
