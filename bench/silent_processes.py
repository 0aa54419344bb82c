"""A worker with many running processes that say nothing: what it costs to wait for them."""

import asyncio
import os
from pathlib import Path

from bench.figures import Figure
from bench.installation import Installation, on_postgres
from bench.processes import AT_ONCE, SLEEP, TRUE, end, private_kb, running, supervisors

RUNNING = 1000
SECONDS = 20.0


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, of all threads that it has now."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def waiting(site: Installation) -> list[Figure]:
    with site.worker(RUNNING) as worker:
        warm = await site.submit(AT_ONCE, TRUE)
        await site.all_in("succeeded", len(warm))
        before = private_kb(worker.pid)
        ids = await site.submit(RUNNING, SLEEP)
        await running(site, RUNNING)
        await asyncio.sleep(5.0)
        pids = list(supervisors(site.folder))
        assert len(pids) == RUNNING
        at = asyncio.get_running_loop().time()
        used, theirs = cpu_seconds(worker.pid), sum(map(cpu_seconds, pids))
        await asyncio.sleep(SECONDS)
        used, theirs = cpu_seconds(worker.pid) - used, sum(map(cpu_seconds, pids)) - theirs
        took = asyncio.get_running_loop().time() - at
        each = (sum(map(private_kb, pids)) + private_kb(worker.pid) - before) / RUNNING / 1024
        await end(site, ids)
    name = f"{site.kind}: {RUNNING} silent processes"
    return [
        Figure(f"{name}: CPU of the worker, of a core", 100 * used / took, 5.0, " %"),
        Figure(f"{name}: CPU of their supervisors together, of a core", 100 * theirs / took, None, " %"),
        Figure(f"{name}: private memory of each, with its share of the worker", each, 0.35, " MB"),
    ]


async def bench(server: str) -> list[Figure]:
    async with on_postgres(server, f"silent_{os.getpid()}") as site:
        return await waiting(site)
