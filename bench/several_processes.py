"""`holdfast worker --processes 2` against one process, in turns: functions that compute, empty functions, memory."""

import re
from pathlib import Path
from typing import Any

from bench.backlog import RATE
from bench.figures import Figure, against
from bench.installation import Installation, on_postgres, until

ROUNDS = 5
COMPUTE: dict[str, Any] = {"runner": "function", "spec": {"name": "compute"}, "inputs": {"steps": 200_000}}
EMPTY: dict[str, Any] = {"runner": "function", "spec": {"name": "noop"}}


async def rate(site: Installation, processes: int, slots: int, job: dict[str, Any], jobs: int) -> tuple[float, float]:
    """Start all processes on a paused queue, then drain it. Return jobs per second, and MB of memory per process."""
    await site.store.queues.pause("default")
    await site.submit(jobs, job)
    with site.worker(slots, "--processes", str(processes)) as worker:

        async def work() -> bool:
            return sum(row.live for row in await site.store.workers.list()) == processes

        await until("all processes work", work)
        memory = sum(map(_own_memory, _workers_of(worker.pid))) / processes
        await site.store.queues.resume("default")
        await site.all_in("succeeded", jobs)
    (row,) = await site.fetch(RATE)
    assert row["n"] == jobs
    await site.fetch("TRUNCATE holdfast.jobs, holdfast.specs, holdfast.attempts, holdfast.events, holdfast.workers")
    return float(row["rate"]), memory


def _workers_of(pid: int) -> list[int]:
    """The processes that run jobs: the children of a parent, else the worker itself."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] or [pid]


def _own_memory(pid: int) -> float:
    """MB of a process, with its share of what several have in common."""
    (found,) = re.findall(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(found) / 1000


async def bench(server: str) -> list[Figure]:
    rates: dict[tuple[str, int], list[float]] = {(what, n): [] for what in ("compute", "empty") for n in (1, 2)}
    memory: dict[int, float] = {}
    async with on_postgres(server, "several_processes") as site:
        for _ in range(ROUNDS):
            for processes in (1, 2):
                found, memory[processes] = await rate(site, processes, 2, COMPUTE, 200)
                rates["compute", processes].append(found)
                found, _ = await rate(site, processes, 2000, EMPTY, 40_000)
                rates["empty", processes].append(found)
    name = "Postgres: jobs/s of --processes 2 against 1:"
    return [
        against(f"{name} functions that compute", rates["compute", 2], rates["compute", 1], wanted=1.5),
        against(f"{name} empty functions", rates["empty", 2], rates["empty", 1], wanted=1.0),
        Figure("Memory of each of two processes against one worker", memory[2], 100.0, " MB", reference=memory[1]),
    ]
