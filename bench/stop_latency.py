"""Stop latency: from a cancel to the signal, with notifications and with polling alone."""

import asyncio
import time
from pathlib import Path

from bench.figures import Figure, percentile
from bench.installation import Installation, on_postgres, until
from bench.processes import running

JOBS = 20
CHILD = 'trap \'date +%s%N >"$1.part"; mv "$1.part" "$1"; exit 0\' TERM; touch "$1.ready"; sleep 600 & wait'


def child(note: Path) -> dict[str, object]:
    """Return a command that records when it was signalled."""
    return {"runner": "process", "spec": {"command": ["/bin/sh", "-c", CHILD, "sh", str(note)]}}


async def waits(site: Installation, **settings: str) -> list[float]:
    """Cancel running processes one by one; return the seconds until each had its signal."""
    with site.worker(JOBS, **settings):
        notes = {
            (await site.store.jobs.submit(child(site.folder / f"note-{n}"))).id: site.folder / f"note-{n}"
            for n in range(JOBS)
        }
        await running(site, JOBS)
        await until("all children", lambda: all(Path(f"{note}.ready").exists() for note in notes.values()))
        asked = {}
        for job_id in notes:
            await asyncio.sleep(0.13)  # Reason: no two polls of the worker look at the same distance.
            asked[job_id] = time.time_ns()
            await site.store.jobs.cancel(job_id)
        await site.all_in("cancelled", JOBS)
    return [(int(notes[job_id].read_text()) - at) / 1e9 for job_id, at in asked.items()]


async def bench(server: str) -> list[Figure]:
    figures: list[Figure] = []
    for name, listen in (("with wake-ups", "true"), ("by polling alone", "false")):
        async with on_postgres(server, f"stops_{listen}") as site:
            seconds = await waits(site, listen=listen)
        figures.append(Figure(f"Postgres: cancel to signal {name}, p95", percentile(seconds, 0.95), 1.0, " s"))
    return figures
