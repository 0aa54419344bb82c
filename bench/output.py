"""A process that prints 200 MB: the worker's memory stays flat, and the record keeps every line up to the cap."""

import time
from pathlib import Path

from bench.figures import Figure
from bench.installation import Installation, on_postgres, until
from bench.processes import TRUE
from holdfast.model import Status

LINES, WIDTH = 2_000_000, 100
CAP = 10 * 1024 * 1024
FILL = "x" * (WIDTH - 12)
PRINT = f'BEGIN {{ for (i = 0; i < {LINES}; i++) printf "%010d {FILL}\\n", i }}'
CHILD = {"runner": "process", "spec": {"command": ["/usr/bin/awk", PRINT]}}


def resident_mb(pid: int) -> float:
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in fields if line.startswith("VmRSS:")) / 1024


async def print_it(site: Installation) -> tuple[str, float, float]:
    """Run it; return the job, how long it took, and how far the worker's memory moved meanwhile."""
    with site.worker(2) as worker:
        await site.submit(10, TRUE)
        await site.all_in("succeeded", 10)
        before = resident_mb(worker.pid)
        seen: list[float] = []
        started = time.monotonic()
        job_id = (await site.store.jobs.submit(CHILD)).id

        async def over() -> bool:
            seen.append(resident_mb(worker.pid))
            return (await site.store.jobs.get(job_id)).status is Status.SUCCEEDED

        await until("200 MB", over, within=300.0, look=0.05)
        return job_id, time.monotonic() - started, max(abs(mb - before) for mb in seen)


async def kept(site: Installation, job_id: str) -> tuple[list[str], bool]:
    """Return the lines in the record, and whether a mark says that it was cut."""
    lines: list[str] = []
    marked = False
    after: int | None = 0
    while after is not None:
        page = await site.store.events.page(job_id, after=after)
        for event in page.items:
            if event.type == "log":
                if event.data.get("capped"):
                    marked = True
                elif event.data.get("missing") is None:
                    lines += event.data["lines"]
        after = page.next_after
    return lines, marked


async def bench(server: str) -> list[Figure]:
    async with on_postgres(server, "output") as site:
        job_id, took, moved = await print_it(site)
        lines, marked = await kept(site, job_id)
    whole = [f"{n:010d} {FILL}" for n in range(CAP // WIDTH)]
    name = "Postgres: a process that prints 200 MB in lines"
    return [
        Figure(f"{name}: the worker's memory moved by", moved, 20.0, " MB"),
        Figure(f"{name}: lines lost below the cap", 0 if lines == whole else abs(len(whole) - len(lines)) or 1, 0),
        Figure(f"{name}: marks of the cut", float(marked), 1, at_least=True),
        Figure(f"{name}: MB/s", LINES * WIDTH / took / 1e6, None),
        Figure(f"{name}: lines/s", LINES / took, None),
    ]
