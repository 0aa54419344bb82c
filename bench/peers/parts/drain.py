"""A backlog drained by 1, 2 and 4 worker processes; CPU per job and memory come from the drain by one."""

from bench.peers.drains import WARM_JOBS, verify, warm, whole_drain
from bench.peers.peer import Peer
from bench.peers.run import Run

WORKERS = (1, 2, 4)


async def one(run: Run, name: str, peer: Peer) -> None:
    jobs, warming = run.jobs_of(peer), min(WARM_JOBS, run.jobs_of(peer))
    found: dict[str, float] = {}
    for count in WORKERS:
        async with run.deployments.fresh(peer) as deployment, deployment.workers(count) as workers:
            await warm(deployment, warming)
            done = await whole_drain(deployment, workers, jobs)
            run.part.kept[name] = await verify(deployment, jobs + warming)
        found[f"rate_{count}"] = done.rate
        if count == 1:
            found |= {"worker_us": done.worker_us, "store_us": done.store_us, "memory_mb": done.memory_mb}
    run.part.add(name, **found)


async def bench(run: Run) -> None:
    await run.in_turns(one)
