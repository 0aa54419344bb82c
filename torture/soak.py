"""`python -m torture.soak --hours 0.5`: half of the load that this machine carries, for long, without faults.

Memory and open files of every process, connections, sizes and dead rows of tables are sampled, and drawn as a picture.
Ended jobs are pruned after some minutes, so that what should be flat can be flat.
"""

import argparse
import asyncio
import os
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.store import Store, open_store
from holdfast.store.store import sqlite_path
from torture.child import SCRIPT
from torture.final import fetch
from torture.history import History
from torture.plot import Panel, svg
from torture.run import in_a_world
from torture.world import TTL, World

EVERY = 10.0
MEASURE_SECONDS = 20.0
KEEP_DAYS = 300 / 86_400
BACKLOG = 300
LIVE = "SELECT count(*) AS n FROM {schema}jobs WHERE status IN ('queued', 'running')"
TABLES = """
SELECT relname AS name, n_dead_tup AS dead, pg_table_size(relid) AS size, pg_indexes_size(relid) AS indexes
FROM pg_stat_user_tables WHERE schemaname = 'holdfast'
"""
CONNECTIONS = "SELECT count(*) AS n FROM pg_stat_activity WHERE backend_type = 'client backend'"


class Samples:
    """What was measured, by panel and line."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))

    def add(self, panel: str, line: str, value: float) -> None:
        self._panels[panel][line].append((time.monotonic() - self._began, value))

    @property
    def panels(self) -> list[Panel]:
        return [Panel(title, lines) for title, lines in self._panels.items()]

    def drift(self) -> list[str]:
        """How each line stood in the second quarter of the time, and how in the last."""
        found = []
        for title, lines in self._panels.items():
            for name, points in lines.items():
                quarter = max(1, len(points) // 4)
                early, late = points[quarter : 2 * quarter] or points[:1], points[-quarter:]
                means = [sum(value for _, value in part) / len(part) for part in (early, late)]
                found.append(f"{title}: {name}: {means[0]:,.1f} → {means[1]:,.1f}")
        return found


def job(world: World, rng: random.Random) -> dict[str, Any]:
    """Mostly functions, one process in ten."""
    if rng.random() < 0.1:
        env = {"JOURNAL": "/dev/null", "LINES": "3", "PACE": "0.05", "CODE": "0"}
        return {"runner": "process", "spec": {"command": ["sh", "-c", SCRIPT], "env": env}}
    return {"runner": "function", "spec": {"name": "talk"}, "inputs": {"lines": 2, "pace": 0.01, "fail": False}}


async def capacity(world: World, store: Store, rng: random.Random) -> float:
    """Jobs per second when there is always a backlog."""
    ended = "SELECT count(*) AS n FROM {schema}jobs WHERE status = 'succeeded'"
    began = time.monotonic()
    while time.monotonic() - began < MEASURE_SECONDS:
        (live,) = await fetch(world.url, LIVE)
        if live[0]["n"] < BACKLOG:
            await store.jobs.submit_many([job(world, rng) for _ in range(BACKLOG)])
        await asyncio.sleep(0.1)
    (done,) = await fetch(world.url, ended)
    return float(done[0]["n"] / (time.monotonic() - began))


async def load(world: World, store: Store, rng: random.Random, rate: float, until: float) -> int:
    """Submit at a steady rate; return how many."""
    submitted, began = 0, time.monotonic()
    while (now := time.monotonic()) < until:
        due = int((now - began) * rate) - submitted
        if due > 0:
            await store.jobs.submit_many([job(world, rng) for _ in range(due)])
            submitted += due
        await asyncio.sleep(0.2)
    return submitted


async def sample_on(world: World, samples: Samples, until: float) -> None:
    while time.monotonic() < until:
        for part in world.parts.values():
            samples.add("memory of each process, MB", part.name, _memory(part.pid))
            samples.add("open files of each process", part.name, len(os.listdir(f"/proc/{part.pid}/fd")))
        (live,) = await fetch(world.url, LIVE)
        samples.add("jobs that have not ended", "jobs", live[0]["n"])
        await (_sample_sqlite if world.postgres is None else _sample_postgres)(world, samples)
        await asyncio.sleep(EVERY)


async def _sample_postgres(world: World, samples: Samples) -> None:
    tables, connections = await fetch(world.url, TABLES, CONNECTIONS)
    samples.add("connections", "connections", connections[0]["n"])
    for row in tables:
        if row["name"] in ("jobs", "specs", "attempts", "events"):
            samples.add("dead rows", row["name"], row["dead"])
            samples.add("size of tables, MB", row["name"], row["size"] / 1e6)
            samples.add("size of indexes, MB", row["name"], row["indexes"] / 1e6)


async def _sample_sqlite(world: World, samples: Samples) -> None:
    path = sqlite_path(world.url)
    for name in (path, f"{path}-wal"):
        size = os.stat(name).st_size if os.access(name, os.F_OK) else 0
        samples.add("size of files, MB", os.path.basename(name), size / 1e6)


def _memory(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def soak(hours: float, store_kind: str) -> tuple[Samples, Sequence[str]]:
    """Soak a world; return what was measured, and what to say of it."""
    history = History(seed=0, store=store_kind, ttl=TTL)
    rng = random.Random(0)
    settings = {"RETENTION_DAYS": str(KEEP_DAYS)}
    async with (
        in_a_world(history, store_kind, settings=settings) as world,
        await open_store(world.url, listen=False) as store,
    ):
        most = await capacity(world, store, rng)
        samples = Samples()
        until = time.monotonic() + hours * 3600
        async with asyncio.TaskGroup() as group:
            group.create_task(sample_on(world, samples, until))
            loading = group.create_task(load(world, store, rng, most / 2, until))
    said = [f"{most:.0f} jobs/s at most; {loading.result()} jobs at half of that in {hours * 60:.0f} min"]
    return samples, [*said, *samples.drift()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="postgres")
    parser.add_argument("--out", type=Path, default=Path("soak.svg"))
    given = parser.parse_args()
    samples, said = asyncio.run(soak(given.hours, given.store))
    given.out.write_text(svg(samples.panels))
    print("\n".join([*said, f"drawn in {given.out}"]))


if __name__ == "__main__":
    main()
