"""How a backlog is drained and how fast: the same way for every peer.

The workers are up and idle and have run some jobs. They are stopped by SIGSTOP while the backlog is submitted and go on
together by SIGCONT, so that no start is in the figure. The rate is that from SIGCONT until the last job is seen to have
ended, on the harness's clock, by asking the database. CPU time is taken at the same two moments. To count from the
first jobs that ended would favour a worker that claims many at once: it has run them before the first is seen.
"""

import asyncio
import signal
import time
from dataclasses import dataclass

from bench.installation import TookTooLong, until
from bench.peers.deployment import Deployment, Workers

WARM_JOBS = 500
STATEMENT = 0.1
NEAR, FAR = 0.02, 0.25
"""Seconds between two questions: seldom in the middle, often near the end."""
PROBE_SHARE = 10
"""At most a tenth of the time is spent on asking."""


@dataclass(frozen=True)
class Moment:
    at: float
    ended: int
    worker_cpu: float
    store_cpu: float


@dataclass(frozen=True)
class Drain:
    """One drain: the rate, CPU microseconds per job, MB per worker, and what was kept of the jobs."""

    jobs: int
    rate: float
    worker_us: float
    store_us: float
    memory_mb: float
    whole: bool
    """All jobs ended; a drain that was cut short after `within` seconds has only a rate."""


def summary(first: Moment, last: Moment, jobs: int, memory_mb: float) -> Drain:
    """What lies between two moments."""
    count = max(1, last.ended - first.ended)
    return Drain(
        jobs=jobs,
        rate=(last.ended - first.ended) / (last.at - first.at),
        worker_us=(last.worker_cpu - first.worker_cpu) / count * 1e6,
        store_us=(last.store_cpu - first.store_cpu) / count * 1e6,
        memory_mb=memory_mb,
        whole=last.ended >= jobs,
    )


def pause(left: int, rate: float, probe_took: float) -> float:
    """How long to wait before the next question: half of what the rest will take, within bounds."""
    expected = left / rate if rate > 0 else 0.0
    return max(min(FAR, expected / 2), NEAR, probe_took * PROBE_SHARE)


async def moment(deployment: Deployment, workers: Workers) -> Moment:
    cpu = workers.cpu(), deployment.probe.cpu()
    at = time.perf_counter()
    return Moment(at, await deployment.ended(), *cpu)


async def follow(deployment: Deployment, workers: Workers, start: Moment, jobs: int, within: float) -> Drain:
    """Watch the workers until all jobs ended, or for so many seconds."""
    while True:
        now = await moment(deployment, workers)
        took = time.perf_counter() - now.at
        if now.ended >= jobs or now.at - start.at > within:
            break
        workers.check()
        await asyncio.sleep(pause(jobs - now.ended, now.ended / (now.at - start.at), took))
    return summary(start, now, jobs, workers.memory_mb())


async def warm(deployment: Deployment, jobs: int) -> None:
    """Let the workers run some jobs, so that what they load or compile on first use is loaded."""
    await deployment.baseline()
    await deployment.submit_bulk(jobs)

    async def all_ended() -> bool:
        return await deployment.ended() >= jobs

    await until(f"{deployment.peer.name}: {jobs} jobs to warm up", all_ended, within=60, look=0.05)


async def stop_between_transactions(deployment: Deployment, workers: Workers) -> None:
    """Stop the workers at a moment when none of them is inside a transaction."""

    async def stopped() -> bool:
        workers.signal(signal.SIGSTOP)
        await asyncio.sleep(STATEMENT)  # Reason: a statement that was sent still runs to its end.
        if await deployment.probe.free():
            return True
        workers.signal(signal.SIGCONT)
        return False

    await until(f"{deployment.peer.name}: idle workers", stopped, within=60, look=0.05)


async def drain(deployment: Deployment, workers: Workers, jobs: int, within: float = 900.0) -> Drain:
    """Submit a backlog to workers that are up, and let them drain it."""
    await deployment.baseline()
    await stop_between_transactions(deployment, workers)
    try:
        await deployment.submit_bulk(jobs)
        await deployment.probe.settle()
        start = Moment(time.perf_counter(), 0, workers.cpu(), deployment.probe.cpu())
    finally:
        workers.signal(signal.SIGCONT)
    return await follow(deployment, workers, start, jobs, within)


async def whole_drain(deployment: Deployment, workers: Workers, jobs: int) -> Drain:
    done = await drain(deployment, workers, jobs)
    if not done.whole:
        raise TookTooLong(f"{deployment.peer.name}: {jobs} jobs were not drained")
    return done


async def verify(deployment: Deployment, jobs: int) -> dict[str, int]:
    """Count what the peer keeps of so many jobs; anything but the right number is an error of the run."""
    kept = await deployment.records()
    wrong = {
        record.what: kept[record.what]
        for record in deployment.peer.records
        if kept[record.what] != jobs * record.per_job
    }
    if wrong:
        raise AssertionError(f"{deployment.peer.name}: of {jobs} jobs it keeps {wrong}")
    return kept
