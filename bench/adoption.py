"""How soon another worker has adopted all attempts of a killed one, with nothing started again."""

import asyncio
import signal
import time

from bench.figures import Figure
from bench.installation import Installation, on_postgres, until
from bench.processes import RUNNING, SLEEP, end, running, supervisors

TTL, BEAT, REAP = 6.0, 2.0, 2.0
SHORT = {"lease_ttl": str(TTL), "heartbeat_interval": str(BEAT), "reaper_interval": str(REAP)}


async def adopted(site: Installation, how: signal.Signals, *, lock: bool = True, **settings: str) -> tuple[float, int]:
    """End a worker with many running attempts; return the seconds until another has them all, and the new starts."""
    dying, heir = f"dying-{time.monotonic_ns()}", f"heir-{time.monotonic_ns()}"
    with site.worker(RUNNING, worker_id=dying, **settings) as old:
        ids = await site.submit(RUNNING, SLEEP)
        await running(site, RUNNING)
        before = set(supervisors(site.folder))
        with site.worker(1, queue="other", worker_id=heir, **settings):
            await until("the second worker", lambda: registered(site, heir))
            await asyncio.sleep(1.0)
            if not lock:
                next(site.folder.glob(f"state/workers/*/{dying}.lock")).unlink()
            old.send_signal(how)
            took = await until("adoption", lambda: owned(site, heir), within=60.0)
            await asyncio.sleep(1.0)
            restarted = len(set(supervisors(site.folder)) - before) + await site.count("attempt > 1")
            assert len(before) == RUNNING
            await end(site, ids)
        old.wait()
    return took, restarted


async def registered(site: Installation, worker: str) -> bool:
    return bool(await site.fetch(f"SELECT 1 FROM {site.table('workers')} WHERE worker = '{worker}'"))


async def owned(site: Installation, worker: str) -> bool:
    return await site.count(f"status = 'running' AND owner = '{worker}'") == RUNNING


async def bench(server: str) -> list[Figure]:
    killed = f"{RUNNING} attempts, worker killed"
    figures: list[Figure] = []
    for name, how, lock, limit, settings in (
        (f"{killed} -9", signal.SIGKILL, True, 0.5, {}),
        (f"{killed} -9, its lock file gone", signal.SIGKILL, False, TTL + REAP + 2.0, SHORT),
        (f"{killed} with SIGTERM", signal.SIGTERM, True, 2.0, {}),
    ):
        async with on_postgres(server, f"adoption_{len(figures)}") as site:
            took, restarted = await adopted(site, how, lock=lock, **settings)
        figures.append(Figure(f"Postgres: {name}: all adopted after", took, limit, " s"))
        figures.append(Figure(f"Postgres: {name}: started again", restarted, 0))
    return figures
