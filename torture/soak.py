"""`python -m torture.soak --hours 0.5`: half of the load that this machine carries, for long, without faults.

Memory and open files of every process, connections, sizes and dead rows of tables are sampled, and drawn as a picture.
Ended jobs are pruned from early on, so that what should be flat can be flat; now and then the load pauses, and all that
was submitted has to end. The last quarter of the time is held against the second: what grew makes the exit code 1.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.duties.pruner import Pruner
from holdfast.model import TERMINAL
from holdfast.store import Store, open_store
from holdfast.store.retention import Retention
from holdfast.store.store import sqlite_path
from torture import samples as panels
from torture.child import SCRIPT
from torture.final import fetch
from torture.history import History
from torture.plot import svg
from torture.run import in_a_world
from torture.samples import Samples
from torture.world import TTL, World

MEASURE_SECONDS = 20.0
BACKLOG = 300
SETTLE_SECONDS = 60.0
LIVE = "SELECT count(*) AS n FROM {schema}jobs WHERE status IN ('queued', 'running')"
TABLES = """
SELECT relname AS name, n_dead_tup AS dead, pg_table_size(relid) AS size, pg_indexes_size(relid) AS indexes
FROM pg_stat_user_tables WHERE schemaname = 'holdfast'
"""
CONNECTIONS = "SELECT count(*) AS n FROM pg_stat_activity WHERE backend_type = 'client backend'"
SAMPLED = ("jobs", "specs", "attempts", "events")


@dataclass(frozen=True)
class Course:
    """How a soak of so many seconds goes."""

    seconds: float

    @property
    def every(self) -> float:
        """Seconds between two samples."""
        return max(1.0, self.seconds / 180)

    @property
    def keep(self) -> float:
        """Seconds for which ended jobs are kept: retention acts well within the first fifth."""
        return self.seconds / 15

    @property
    def vacuum(self) -> int:
        """Seconds between two looks of autovacuum: a minute, as Postgres has it, or less in a short soak."""
        return max(2, min(60, int(self.seconds / 30)))

    def pauses(self, at: float) -> bool:
        """Whether nothing is submitted at this time: the last tenth of each twelfth."""
        return at % (self.seconds / 12) > 0.9 * self.seconds / 12


def job(rng: random.Random) -> dict[str, Any]:
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
        if await live(world) < BACKLOG:
            await store.jobs.submit_many([job(rng) for _ in range(BACKLOG)])
        await asyncio.sleep(0.1)
    (done,) = await fetch(world.url, ended)
    return float(done[0]["n"] / (time.monotonic() - began))


async def live(world: World) -> int:
    (found,) = await fetch(world.url, LIVE)
    return int(found[0]["n"])


async def load(store: Store, rng: random.Random, rate: float, course: Course) -> int:
    """Submit at a steady rate but for the pauses; return how many."""
    submitted, began, before = 0, time.monotonic(), 0.0
    due = 0.0
    while (now := time.monotonic() - began) < course.seconds:
        due += 0.0 if course.pauses(now) else (now - before) * rate
        before = now
        if (count := int(due) - submitted) > 0:
            await store.jobs.submit_many([job(rng) for _ in range(count)])
            submitted += count
        await asyncio.sleep(0.2)
    return submitted


@dataclass
class Removed:
    """What retention did: how many jobs went, and the seconds until the first."""

    count: int = 0
    first: float = 0.0


async def prune_on(store: Store, course: Course, removed: Removed) -> None:
    """Remove what ended longer ago than it is kept, again and again: the duty of a worker does it every ten minutes."""
    pruner = Pruner(store, Retention(ages=dict.fromkeys(TERMINAL, course.keep), grace=course.keep))
    began = time.monotonic()
    while True:
        gone = await pruner.run_once()
        if gone and not removed.count:
            removed.first = time.monotonic() - began
        removed.count += gone
        await asyncio.sleep(course.every if pruner.at_end else pruner.rest)


async def sample_on(world: World, samples: Samples, course: Course) -> None:
    while True:
        for part in world.parts.values():
            samples.add(panels.MEMORY, part.name, _memory(part.pid))
            samples.add(panels.FILES, part.name, len(os.listdir(f"/proc/{part.pid}/fd")))
        samples.add(panels.LIVE, "jobs", await live(world))
        await (_sample_sqlite if world.postgres is None else _sample_postgres)(world, samples)
        await asyncio.sleep(course.every)


async def _sample_postgres(world: World, samples: Samples) -> None:
    tables, connections = await fetch(world.url, TABLES, CONNECTIONS)
    samples.add(panels.CONNECTIONS, "connections", connections[0]["n"])
    for row in tables:
        if row["name"] in SAMPLED:
            samples.add(panels.DEAD, row["name"], row["dead"])
            samples.add(panels.TABLES, row["name"], row["size"] / 1e6)
            samples.add(panels.INDEXES, row["name"], row["indexes"] / 1e6)


async def _sample_sqlite(world: World, samples: Samples) -> None:
    path = sqlite_path(world.url)
    for name in (path, f"{path}-wal"):
        size = os.stat(name).st_size if os.access(name, os.F_OK) else 0
        samples.add(panels.DATABASE, os.path.basename(name), size / 1e6)


def _memory(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def soak(course: Course, store_kind: str) -> tuple[Samples, Sequence[str], bool]:
    """Soak a world; return what was measured, what to say of it, and whether all is flat and all jobs have ended."""
    history = History(seed=0, store=store_kind, ttl=TTL)
    rng = random.Random(0)
    settings = {"RETENTION_DAYS": str(course.keep / 86_400)}
    async with (
        in_a_world(
            history, store_kind, settings=settings, postgres_settings=[f"autovacuum_naptime={course.vacuum}"]
        ) as world,
        await open_store(world.url, listen=False) as store,
    ):
        most = await capacity(world, store, rng)
        samples, removed = Samples(), Removed()
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(sample_on(world, samples, course)),
                group.create_task(prune_on(store, course, removed)),
            ]
            submitted = await load(store, rng, most / 2, course)
            for task in beside:
                task.cancel()
        left = await _left(world)
    drifts = samples.drifts(course.seconds)
    grown = [drift for drift in drifts if not drift.flat]
    said = [
        f"{most:.0f} jobs/s at most; {submitted} jobs at half of that in {course.seconds / 60:.0f} min",
        *map(str, drifts),
        f"{removed.count} jobs were pruned, the first after {removed.first:.0f} s; {left} have not ended",
        "flat" if not grown else f"{len(grown)} of {len(drifts)} lines grow",
    ]
    return samples, said, not grown and not left and removed.count > 0


async def _left(world: World) -> int:
    """How many jobs have not ended, though the load has."""
    until = time.monotonic() + SETTLE_SECONDS
    while (left := await live(world)) and time.monotonic() < until:  # noqa: ASYNC110 - a database sends no event for it
        await asyncio.sleep(0.5)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="postgres")
    parser.add_argument("--out", type=Path, default=Path("soak.svg"))
    given = parser.parse_args()
    samples, said, well = asyncio.run(soak(Course(given.hours * 3600), given.store))
    given.out.write_text(svg(samples.panels))
    print("\n".join([*said, f"drawn in {given.out}"]))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
