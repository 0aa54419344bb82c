"""Pickup latency: from before the submit call to the first line of the function, on an idle worker."""

import asyncio
import time
from functools import partial

from bench.figures import Figure, percentile
from bench.functions import app
from bench.installation import Installation, on_postgres, on_sqlite, until
from holdfast.assemble import worker_of
from holdfast.config import load
from holdfast.model import Status

JOBS = 200
EVERY = 0.05
STAMP = {"runner": "function", "spec": {"name": "stamp"}}


async def waits(site: Installation) -> list[float]:
    """Submit one job at a time to an idle worker; return the milliseconds until each began."""
    warm = (await site.submit(1, STAMP))[0]
    await until("the first job", partial(ended, site, warm))
    begun: dict[str, int] = {}
    for _ in range(JOBS):
        await asyncio.sleep(EVERY)
        before = time.monotonic_ns()
        job = await site.store.jobs.submit(STAMP)
        begun[job.id] = before
    await until("the last job", partial(ended, site, list(begun)[-1]))
    found = [await site.store.jobs.get(job_id) for job_id in begun]
    return [(int(job.result) - begun[job.id]) / 1e6 for job in found]


async def ended(site: Installation, job_id: str) -> bool:
    return (await site.store.jobs.get(job_id)).status is Status.SUCCEEDED


async def across_processes(site: Installation) -> list[float]:
    with site.worker(10):
        return await waits(site)


async def in_one_process(site: Installation) -> list[float]:
    """The application that submits also runs the worker: they share the process, and its wake-ups."""
    settings = load({"database_url": site.url, "data_dir": site.folder, "process_user": "root"}, {})
    async with worker_of(settings, queues={"default": 10}, functions=app.functions) as worker:
        shared = Installation(site.kind, site.url, site.folder, worker._store)
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            try:
                return await waits(shared)
            finally:
                worker.drain()


async def bench(server: str) -> list[Figure]:
    async with on_postgres(server, "pickup") as site:
        postgres = await across_processes(site)
    async with on_sqlite() as site:
        inside = await in_one_process(site)
    async with on_sqlite() as site:
        across = await across_processes(site)
    name = "pickup by an idle worker"
    return [
        Figure(f"Postgres: {name}, p50", percentile(postgres, 0.5), 10, " ms"),
        Figure(f"Postgres: {name}, p99", percentile(postgres, 0.99), 50, " ms"),
        Figure(f"SQLite: {name} in the same process, p50", percentile(inside, 0.5), 5, " ms"),
        Figure(f"SQLite: {name} in another process, p50", percentile(across, 0.5), 30, " ms"),
    ]
