"""Pickup: one job at a time to an idle worker, from before the submit to the first line of the function."""

from pathlib import Path

from bench.figures import percentile
from bench.installation import until
from bench.peers.drains import warm
from bench.peers.peer import Peer
from bench.peers.run import Run

JOBS, EVERY, WARM = 200, 0.05, 50


def delays(stamps: Path) -> list[tuple[int, float]]:
    """The submit of each job on the monotonic clock, and the milliseconds until it began."""
    lines = stamps.read_text().splitlines() if stamps.exists() else []
    return [(int(at), (int(began) - int(at)) / 1e6) for at, began in (line.split() for line in lines)]


async def one(run: Run, name: str, peer: Peer) -> None:
    jobs = min(JOBS, run.jobs)
    async with run.deployments.fresh(peer) as deployment, deployment.workers(1):
        await warm(deployment, WARM)
        await deployment.tell("stamps", count=10, every=EVERY)
        await until("the first stamps", lambda: len(delays(deployment.stamps)) >= 10, within=60)
        deployment.stamps.unlink()
        await deployment.tell("stamps", count=jobs, every=EVERY)
        await until("the last stamps", lambda: len(delays(deployment.stamps)) >= jobs, within=60)
        found = [delay for _, delay in delays(deployment.stamps)]
    run.part.add(name, p50=percentile(found, 0.5), p99=percentile(found, 0.99))


async def bench(run: Run) -> None:
    await run.in_turns(one)
