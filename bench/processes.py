"""Process jobs: how many a second, and what a running one costs in memory."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Figure, against
from bench.installation import Installation, on_postgres, on_sqlite

AT_ONCE = 16
JOBS = 1000
ROUNDS = 5
RUNNING = 200
TRUE = {"runner": "process", "spec": {"command": ["/bin/true"]}}
SLEEP = {"runner": "process", "spec": {"command": ["/bin/sleep", "600"]}}


async def bare() -> float:
    """The rate of a plain loop that spawns so many at a time."""
    left = iter(range(JOBS))

    async def spawn() -> None:
        for _ in left:
            process = await asyncio.create_subprocess_exec("/bin/true")
            await process.wait()

    started = time.perf_counter()
    await asyncio.gather(*(spawn() for _ in range(AT_ONCE)))
    return JOBS / (time.perf_counter() - started)


async def ours(site: Installation) -> float:
    ids = await site.submit(JOBS, TRUE)
    with site.worker(AT_ONCE, "--once") as worker:
        await asyncio.to_thread(worker.wait)
    mine = f"status = 'succeeded' AND id >= '{min(ids)}' AND id <= '{max(ids)}'"
    (row,) = await site.fetch(
        f"SELECT min(finished_at) AS first, max(finished_at) AS last, count(*) AS n FROM {site.table('jobs')}"
        f" WHERE {mine}"
    )
    assert row["n"] == JOBS
    span = row["last"] - row["first"]
    return (JOBS - 1) / (span / 1e6 if isinstance(span, int) else span.total_seconds())


async def rates(site: Installation) -> Figure:
    mine: list[float] = []
    plain: list[float] = []
    for _ in range(ROUNDS):
        plain.append(await bare())
        mine.append(await ours(site))
    return against(f"{site.kind}: process jobs/s, 16 at a time, against a bare loop", mine, plain, wanted=0.5)


# Memory


def private_kb(pid: int) -> int:
    """Memory that a process shares with nobody."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def supervisors(folder: Path) -> Iterator[int]:
    """The supervisors of attempts in this folder."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                program, *arguments = (path / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if program.endswith(b"holdfast-supervisor") and arguments[0].startswith(bytes(folder)):
                yield int(path.name)


async def memory(site: Installation) -> Figure:
    """Megabytes for each of many attempts that run: the supervisor, and its share of the worker."""
    with site.worker(RUNNING) as worker:
        warm = await site.submit(AT_ONCE, TRUE)
        await site.all_in("succeeded", len(warm))
        before = private_kb(worker.pid)
        ids = await site.submit(RUNNING, SLEEP)
        await running(site, RUNNING)
        await asyncio.sleep(3.0)
        growth = private_kb(worker.pid) - before
        each = [private_kb(pid) for pid in supervisors(site.folder)]
        assert len(each) == RUNNING
        await end(site, ids)
    return Figure(
        f"{site.kind}: private memory of each of {RUNNING} running attempts",
        (sum(each) + growth) / RUNNING / 1024,
        1.0,
        " MB",
    )


async def running(site: Installation, count: int) -> None:
    """Wait until so many attempts run."""
    await site.all_in("running' AND phase = 'started", count)


async def end(site: Installation, ids: list[str]) -> None:
    """Cancel jobs and wait for their end."""
    for job_id in ids:
        await site.store.jobs.cancel(job_id)
    await site.all_in("cancelled", len(ids))


async def bench(server: str) -> list[Figure]:
    figures: list[Figure] = []
    async with on_postgres(server, "processes") as site:
        figures.append(await rates(site))
        figures.append(await memory(site))
    async with on_sqlite() as site:
        figures.append(await rates(site))
    return figures
