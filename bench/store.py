"""Store operations against raw SQL on the plainest possible jobs table, in one run, through the same driver.

Run by `make bench`. Both databases with their default durability (fsync on). What counts are the ratios; the absolute
figures belong to the machine.
"""

import asyncio
import contextlib
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
from tests.support.cluster import cluster

from holdfast.model import Claimable, Lease, Outcome, new_id
from holdfast.store.migrate import migrate
from holdfast.store.store import Store, connect

JOBS = 10_000
BATCH = 100
CONNECTIONS = 2
ROUNDS = 5
RESULT = {"rows": 3, "took": 1.25, "note": "done"}
PAIRS = [Claimable(queue="default", capability="function:noop", domain="function")]


def submissions(count: int) -> list[dict[str, Any]]:
    return [
        {
            "runner": "function",
            "spec": {"name": "noop"},
            "kind": "bench",
            "inputs": {"row": n, "text": "x" * 100},
            "labels": {"team": "blue"},
        }
        for n in range(count)
    ]


def encode_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class Rates:
    """Rates of one measure, ours and raw, taken in turns so that both meet the same machine."""

    def __init__(self, name: str, unit: str = "jobs/s") -> None:
        self.name = name
        self.unit = unit
        self.ours: list[float] = []
        self.raw: list[float] = []

    def line(self, target: float) -> str:
        ours, raw = statistics.median(self.ours), statistics.median(self.raw)
        pairs = sorted(o / r for o, r in zip(self.ours, self.raw, strict=True))
        ratio = statistics.median(pairs)
        verdict = "ok" if ratio >= target else "BELOW"
        return (
            f"{self.name:<42} {ours:>10,.0f} {raw:>10,.0f} {self.unit}   ratio {ratio:.2f} "
            f"({pairs[0]:.2f}–{pairs[-1]:.2f}), wanted {target:.2f}: {verdict}"
        )


async def timed(count: int, work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return count / (time.perf_counter() - started)


async def drain(store: Store, worker: str) -> int:
    """Claim and finish in batches until nothing is left."""
    done = 0
    while True:
        claimed = await store.leases.claim(worker, PAIRS, slots=BATCH, ttl=60, domains=["function"])
        if not claimed.claimed:
            return done
        ends: Sequence[tuple[Lease, Outcome]] = [(lease, Outcome.succeeded(RESULT)) for lease in claimed.claimed]
        answers = await store.leases.finish(ends)
        assert all(answers.values())
        done += len(ends)


async def drain_all(store: Store, count: int) -> None:
    done = await asyncio.gather(*(drain(store, f"worker-{n}") for n in range(CONNECTIONS)))
    assert sum(done) == count


# Raw SQL on Postgres


async def raw_postgres(url: str) -> "asyncpg.Pool[asyncpg.Record]":
    pool = await asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS)
    await pool.execute(
        "CREATE TABLE raw_jobs (id bigserial PRIMARY KEY, status text NOT NULL, payload text NOT NULL, result text)"
    )
    await pool.execute("CREATE INDEX ON raw_jobs (id) WHERE status = 'queued'")
    await pool.execute(f"CREATE TABLE raw_rows (id uuid PRIMARY KEY, {RAW_COLUMNS})")
    await pool.execute(RAW_INDEX)
    return pool


# The same bytes as one row each: what ours writes for a job, in one table, with the key and the claim's index.
RAW_COLUMNS = (
    "tenant text, queue text, capability text, priority int, status text, gate text, max_attempts int, seq bigint,"
    " kind text, runner text, spec jsonb, inputs jsonb, labels jsonb,"
    " requested_at timestamptz, available_at timestamptz, updated_at timestamptz"
)
RAW_INDEX = (
    "CREATE INDEX raw_claimable ON raw_rows (queue, capability, tenant, priority DESC, requested_at, id)"
    " WHERE gate = 'open'"
)


def raw_row(job: dict[str, Any]) -> tuple[Any, ...]:
    capability = f"{job['runner']}:{job['spec']['name']}"
    documents = (encode_text(job[name]) for name in ("spec", "inputs", "labels"))
    return (
        *(new_id(), "default", "default", capability, 0, "queued", "open", 1, 1, job["kind"], job["runner"]),
        *documents,
    )


async def raw_postgres_bulk(pool: "asyncpg.Pool[asyncpg.Record]", columns: list[Any]) -> None:
    await pool.execute(
        "INSERT INTO raw_rows SELECT *, now(), now(), now() FROM unnest($1::uuid[], $2::text[], $3::text[],"
        " $4::text[], $5::int[], $6::text[], $7::text[], $8::int[], $9::bigint[], $10::text[], $11::text[],"
        " $12::jsonb[], $13::jsonb[], $14::jsonb[])",
        *columns,
    )


async def raw_postgres_submit(pool: "asyncpg.Pool[asyncpg.Record]", payloads: list[str]) -> None:
    await pool.execute("INSERT INTO raw_jobs (status, payload) SELECT 'queued', unnest($1::text[])", payloads)


async def raw_postgres_drain(pool: "asyncpg.Pool[asyncpg.Record]") -> int:
    done = 0
    async with pool.acquire() as connection:
        while True:
            rows = await connection.fetch(
                "WITH picked AS MATERIALIZED ("
                "  SELECT id FROM raw_jobs WHERE status = 'queued' ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)"
                "UPDATE raw_jobs SET status = 'running' FROM picked WHERE raw_jobs.id = picked.id"
                " RETURNING raw_jobs.id, payload",
                BATCH,
            )
            if not rows:
                return done
            ids = [row["id"] for row in rows]
            await connection.execute("UPDATE raw_jobs SET status = 'done' WHERE id = ANY($1)", ids)
            done += len(ids)


async def postgres_rates(url: str, rounds: int = ROUNDS) -> tuple[Rates, Rates, int]:
    """Return the rates of bulk submits and of claim and finish, ours and raw in turns, and the deadlocks of ours."""
    database = await connect(url, connections=CONNECTIONS, listen=False)
    await migrate(database)
    pool = await raw_postgres(url)
    bulk, work = Rates("Postgres: bulk submit of 10,000"), Rates("Postgres: claim 100 + finish 100")
    async with Store(database) as store:
        for _ in range(rounds):
            jobs = submissions(JOBS)
            payloads = [encode_text(job) for job in jobs]
            await raw_postgres_submit(pool, payloads)
            columns = list(zip(*(raw_row(job) for job in jobs), strict=True))
            bulk.raw.append(await timed(JOBS, raw_postgres_bulk(pool, columns)))
            bulk.ours.append(await timed(JOBS, store.jobs.submit_many(jobs)))
            work.raw.append(await timed(JOBS, asyncio.gather(*(raw_postgres_drain(pool) for _ in range(CONNECTIONS)))))
            work.ours.append(await timed(JOBS, drain_all(store, JOBS)))
        deadlocks = store.counters.deadlocks
    await pool.close()
    return bulk, work, deadlocks


async def bench_postgres(url: str) -> list[str]:
    bulk, work, deadlocks = await postgres_rates(url)
    return [work.line(0.4), bulk.line(0.4), f"Postgres: deadlocks {deadlocks}"]


# Raw SQL on SQLite


class RawSqlite:
    """The same raw queue on SQLite."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.db = self._connect()
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("CREATE TABLE raw_jobs (id INTEGER PRIMARY KEY, status TEXT, payload TEXT, result TEXT)")
        self.db.execute("CREATE INDEX raw_queued ON raw_jobs (id) WHERE status = 'queued'")
        self.db.execute(f"CREATE TABLE raw_rows (id text PRIMARY KEY, {RAW_COLUMNS})")
        self.db.execute(RAW_INDEX)

    def bulk(self, rows: list[tuple[Any, ...]]) -> None:
        self.db.execute("BEGIN IMMEDIATE")
        self.db.executemany("INSERT INTO raw_rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 5, 5, 5)", rows)
        self.db.execute("COMMIT")

    def submit(self, payloads: list[str]) -> None:
        self.db.execute("BEGIN IMMEDIATE")
        self.db.executemany("INSERT INTO raw_jobs (status, payload) VALUES ('queued', ?)", [(p,) for p in payloads])
        self.db.execute("COMMIT")

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=30)
        db.execute("PRAGMA synchronous = FULL")
        return db

    async def drain_all(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(self._drain) for _ in range(CONNECTIONS)))

    def _drain(self) -> None:
        with contextlib.closing(self._connect()) as db:
            self.drain(db)

    @staticmethod
    def drain(db: sqlite3.Connection) -> None:
        while True:
            db.execute("BEGIN IMMEDIATE")
            rows = db.execute(
                "UPDATE raw_jobs SET status = 'running' WHERE id IN ("
                "  SELECT id FROM raw_jobs WHERE status = 'queued' ORDER BY id LIMIT ?) RETURNING id, payload",
                (BATCH,),
            ).fetchall()
            db.execute("COMMIT")
            if not rows:
                return
            db.execute("BEGIN IMMEDIATE")
            db.executemany("UPDATE raw_jobs SET status = 'done' WHERE id = ?", [(row[0],) for row in rows])
            db.execute("COMMIT")


async def bench_sqlite(folder: Path) -> list[str]:
    database = await connect(f"sqlite:///{folder / 'ours.db'}")
    await migrate(database)
    raw = RawSqlite(folder / "raw.db")
    bulk, work = Rates("SQLite: bulk submit of 10,000"), Rates("SQLite: claim 100 + finish 100")
    alone: list[float] = []
    async with Store(database) as store:
        for _ in range(ROUNDS):
            jobs = submissions(JOBS)
            payloads = [encode_text(job) for job in jobs]
            rows = [raw_row(job) for job in jobs]
            bulk.raw.append(await timed(JOBS, asyncio.to_thread(raw.bulk, rows)))
            bulk.ours.append(await timed(JOBS, store.jobs.submit_many(jobs)))
            raw.submit(payloads)
            alone.append(await timed(JOBS, asyncio.to_thread(raw.drain, raw.db)))
            raw.submit(payloads)
            work.raw.append(await timed(JOBS, raw.drain_all()))
            work.ours.append(await timed(JOBS, drain_all(store, JOBS)))
    raw.db.close()
    rate = statistics.median(alone)
    lone = f"SQLite: raw over one connection {rate:,.0f} jobs/s, ratio {statistics.median(work.ours) / rate:.2f}"
    return [work.line(0.3), lone, bulk.line(0.4)]


@contextlib.asynccontextmanager
async def scratch() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        yield Path(name)


async def main() -> None:
    lines: list[str] = []
    async with scratch() as folder:
        lines += await bench_sqlite(folder)
    with cluster(settings=()) as url:
        lines += await bench_postgres(url)
    print(f"{'measure':<42} {'ours':>10} {'raw':>10}   (median of {ROUNDS} rounds, fsync on)")
    print("\n".join(lines))
    if any("BELOW" in line for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main())
