"""Conditions that slow other queues down: many jobs, an old transaction, a prune in the background.

Run by `make bench`. Each figure is a ratio of two measurements of the same thing in the same run. HOLDFAST_BENCH_SCALE
makes the crowd smaller (0.1) for a quick look.
"""

import asyncio
import contextlib
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import asyncpg
from tests.support.bulk_data import DUE, ENDED, FUTURE, LANED, QUEUED, fill_postgres, fill_sqlite
from tests.support.cluster import cluster

from bench import store as store_bench
from bench.store import drain_all, submissions
from holdfast.duties.pruner import Pruner
from holdfast.model import Claimable, Outcome, Status, new_id
from holdfast.store.migrate import migrate
from holdfast.store.retention import Retention
from holdfast.store.store import Store, connect

SCALE = float(os.environ.get("HOLDFAST_BENCH_SCALE", "1"))
PAIRS = [Claimable(queue="default", capability="function:f", domain="function")]
CLAIMS = 40
SLOTS = 100
DUE_JOBS = CLAIMS * SLOTS + 1000


def scaled(count: int) -> int:
    return max(1000, int(count * SCALE))


CROWD = [(scaled(1_000_000), FUTURE), (scaled(100_000), LANED), (scaled(1_000_000), ENDED)]


async def claim_seconds(store: Store) -> float:
    """The median time of a claim of 100."""
    times = []
    for _ in range(CLAIMS):
        started = time.perf_counter()
        leases = (await store.leases.claim("w", PAIRS, slots=SLOTS, ttl=600, domains=["function"])).claimed
        times.append(time.perf_counter() - started)
        assert len(leases) == SLOTS
    return statistics.median(times)


def line(name: str, ratio: float, target: float, *, at_most: bool, detail: str) -> str:
    good = ratio <= target if at_most else ratio >= target
    bound = "at most" if at_most else "at least"
    return f"{name:<66} {ratio:5.2f}, wanted {bound} {target:.2f}: {'ok' if good else 'BELOW'}   ({detail})"


async def crowded(empty: Store, full: Store, where: str, tenants: str) -> str:
    alone, among = await claim_seconds(empty), await claim_seconds(full)
    detail = f"{alone * 1000:.1f} ms alone, {among * 1000:.1f} ms in the crowd"
    name = f"{where}: claim of 100 in a crowd of 2.1 million, due jobs of {tenants}"
    return line(name, among / alone, 1.3, at_most=True, detail=detail)


# Postgres


@contextlib.asynccontextmanager
async def database(server: str, name: str) -> AsyncIterator[tuple[str, Store]]:
    """A fresh database on the server, migrated and open."""
    admin = await asyncpg.connect(server)
    await admin.execute(f"CREATE DATABASE {name}")
    await admin.close()
    url = server.rsplit("/", 1)[0] + f"/{name}" if "?" not in server else server.replace("/postgres?", f"/{name}?")
    opened = await connect(url, connections=4, listen=False)
    await migrate(opened)
    async with Store(opened) as store:
        yield url, store


async def filled(url: str, kinds: list[tuple[int, dict[str, str]]]) -> None:
    connection = await asyncpg.connect(url)
    await fill_postgres(connection, kinds)
    await connection.close()


async def crowded_postgres(server: str) -> list[str]:
    lines = []
    many = {**QUEUED}
    async with database(server, "alone") as (alone_url, alone), database(server, "crowd") as (crowd_url, crowd):
        await filled(alone_url, [(DUE_JOBS, DUE)])
        await filled(crowd_url, [*CROWD, (DUE_JOBS, DUE)])
        lines.append(await crowded(alone, crowd, "Postgres", "one tenant"))
        await filled(alone_url, [(DUE_JOBS * 2, many)])
        await filled(crowd_url, [(DUE_JOBS * 2, many)])
        lines.append(await crowded(alone, crowd, "Postgres", "1,000 tenants"))
    return lines


async def churn(store: Store, count: int) -> None:
    """Let jobs come and go."""
    for _ in range(count // 10_000):
        await store.jobs.submit_many(submissions(10_000))
        await drain_all(store, 10_000)


async def backlog_rate(store: Store) -> float:
    """The rate at which 2 workers eat into a backlog, and the rest of it out of the way."""
    backlog = 60_000
    for _ in range(backlog // 10_000):
        await store.jobs.submit_many(submissions(10_000))
    done, started = 0, time.perf_counter()

    async def worker(name: str) -> None:
        nonlocal done
        while time.perf_counter() - started < 3.0 and done < backlog:
            leases = (
                await store.leases.claim(name, store_bench.PAIRS, slots=SLOTS, ttl=60, domains=["function"])
            ).claimed
            await store.leases.finish([(lease, Outcome.succeeded(store_bench.RESULT)) for lease in leases])
            done += len(leases)

    await asyncio.gather(worker("worker-0"), worker("worker-1"))
    rate = done / (time.perf_counter() - started)
    await drain_all(store, backlog - done)
    return rate


async def pinned(server: str) -> str:
    """The rate of claim and finish while an old transaction keeps 200,000 dead rows in every index."""
    async with database(server, "pinned") as (url, store):
        before = statistics.median([await backlog_rate(store) for _ in range(3)])
        old = await asyncpg.connect(url)
        await old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM holdfast.queues")
        await churn(store, scaled(200_000))
        during = await backlog_rate(store)
        await old.execute("ROLLBACK")
        await old.close()
    detail = f"{before:,.0f} jobs/s before, {during:,.0f} while the old transaction is open"
    name = "Postgres: claim rate with an old transaction open and 200,000 jobs ended since"
    return line(name, during / before, 0.5, at_most=False, detail=detail)


async def work(store: Store, until: Callable[[], bool]) -> float:
    """Let 4 workers claim and finish until told to stop; return the rate."""
    done = 0

    async def worker(name: str) -> None:
        nonlocal done
        while not until():
            leases = (await store.leases.claim(name, PAIRS, slots=50, ttl=60)).claimed
            await store.leases.finish([(lease, Outcome.succeeded()) for lease in leases])
            done += len(leases)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for n in range(4):
            group.create_task(worker(f"worker-{n}"))
    return done / (time.perf_counter() - started)


async def pruning(server: str) -> str:
    """The rate of 4 workers while 100,000 of 1,000,000 finished jobs are removed."""
    async with database(server, "pruned") as (url, store):
        old = {**ENDED, "finished_at": "{now}", "started_at": "{now}", "requested_at": "{now}"}
        await filled(
            url, [(scaled(100_000), old), (scaled(900_000), {**ENDED, "tenant": "'kept'"}), (scaled(600_000), DUE)]
        )
        connection = await asyncpg.connect(url)
        await connection.execute(
            "UPDATE holdfast.jobs SET requested_at = requested_at - interval '9 days',"
            " started_at = started_at - interval '9 days', finished_at = finished_at - interval '9 days'"
            " WHERE status = 'succeeded' AND tenant <> 'kept'"
        )
        await connection.execute("VACUUM ANALYZE holdfast.jobs")
        await connection.close()
        alone = await during(store, 10.0)
        pruner = Pruner(store, Retention(ages={Status.SUCCEEDED: 7 * 86_400}))
        removed, beside = await prune_beside(store, pruner, scaled(100_000))
    detail = f"{alone:,.0f} jobs/s alone, {beside:,.0f} beside; {removed:,} removed"
    return line(
        "Postgres: claim rate of 4 workers beside a prune of 100,000", beside / alone, 0.8, at_most=False, detail=detail
    )


async def during(store: Store, seconds: float) -> float:
    deadline = time.perf_counter() + seconds
    return await work(store, lambda: time.perf_counter() >= deadline)


async def prune_beside(store: Store, pruner: Pruner, wanted: int) -> tuple[int, float]:
    removed, over = 0, False

    async def prune() -> None:
        nonlocal removed, over
        while removed < wanted:
            removed += await pruner.run_once()
            await asyncio.sleep(pruner.rest)
        over = True

    async with asyncio.TaskGroup() as group:
        group.create_task(prune())
        result = await group.create_task(work(store, lambda: over))
    return removed, result


# SQLite


async def crowded_sqlite(folder: Path) -> list[str]:
    async def full(name: str, kinds: list[tuple[int, dict[str, str]]]) -> Store:
        opened = await connect(f"sqlite:///{folder / name}")
        await migrate(opened)
        raw: Any = sqlite3.connect(folder / name, isolation_level=None)
        fill_sqlite(raw, new_id, kinds)
        raw.close()
        return Store(opened)

    alone = await full("alone.db", [(DUE_JOBS, DUE)])
    crowd = await full("crowd.db", [*CROWD, (DUE_JOBS, DUE)])
    async with alone, crowd:
        return [await crowded(alone, crowd, "SQLite", "one tenant")]


async def main() -> None:
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        lines += await crowded_sqlite(Path(name))
    with cluster(settings=()) as server:
        lines += await crowded_postgres(server)
        lines.append(await pinned(server))
        lines.append(await pruning(server))
    print("\n".join(lines))
    if any("BELOW" in line for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main())
