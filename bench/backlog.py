"""Function jobs drained from a backlog by one worker process, against raw SQL and against PgQueuer."""

import asyncio

import asyncpg

from bench.figures import Figure, against
from bench.installation import Installation, new_database, on_postgres
from bench.pgqueuer import PgQueuer
from bench.store import raw_postgres, raw_postgres_drain, raw_postgres_submit, timed

JOBS = 20_000
SLOTS = 2000
ROUNDS = 5
RATE = (
    "WITH ends AS (SELECT finished_at AS at FROM holdfast.jobs WHERE status = 'succeeded'),"
    " span AS (SELECT min(at) AS first, max(at) AS last, count(*) AS n FROM ends)"
    "SELECT n, (SELECT count(*) FROM ends WHERE at > first) / extract(epoch FROM last - first)::float8 AS rate"
    " FROM span"
)
"""Jobs that ended after the first batch, by the time between the first end and the last: no process start in it."""


async def ours(site: Installation, slots: int) -> float:
    await site.submit(JOBS, {"runner": "function", "spec": {"name": "noop"}})
    with site.worker(slots, "--once") as worker:
        await asyncio.to_thread(worker.wait)
    (row,) = await site.fetch(RATE)
    assert row["n"] == JOBS
    await site.fetch("TRUNCATE holdfast.jobs, holdfast.specs, holdfast.attempts, holdfast.events")
    return float(row["rate"])


async def raw(pool: "asyncpg.Pool[asyncpg.Record]") -> float:
    """Claim 100 and complete 100, again and again, from one connection of one process."""
    await raw_postgres_submit(pool, ["{}"] * JOBS)
    return await timed(JOBS, raw_postgres_drain(pool))


async def bench(server: str) -> list[Figure]:
    peer = PgQueuer(await new_database(server, "pgqueuer"))
    await peer.install()
    rates: dict[str, list[float]] = {"ours": [], "raw": [], "pgqueuer": []}
    async with on_postgres(server, "drain") as site:
        pool = await raw_postgres(await new_database(server, "raw"))
        for _ in range(ROUNDS):
            rates["raw"].append(await raw(pool))
            rates["ours"].append(await ours(site, SLOTS))
            rates["pgqueuer"].append(await peer.drain(JOBS))
        await pool.close()
    name = "Postgres: function jobs/s of 1 worker against"
    return [
        against(f"{name} raw SQL in batches of 100", rates["ours"], rates["raw"], wanted=0.3),
        against(f"{name} PgQueuer", rates["ours"], rates["pgqueuer"], wanted=1.2),
    ]
