"""A drain by one worker before and after 200,000 jobs came and went under one old transaction."""

from bench.peers.drains import WARM_JOBS, drain, warm, whole_drain
from bench.peers.keepers import PostgresProbe
from bench.peers.old_transaction import old_transaction
from bench.peers.peer import Peer
from bench.peers.run import Run

CHURN = 5
"""Backlogs that come and go: with the 40,000 jobs of a full run, 200,000 jobs."""
WITHIN = 60.0


async def one(run: Run, name: str, peer: Peer) -> None:
    jobs = run.jobs_of(peer)
    async with run.deployments.fresh(peer) as deployment, deployment.workers(1) as workers:
        assert isinstance(deployment.probe, PostgresProbe)
        await warm(deployment, min(WARM_JOBS, jobs))
        before = await whole_drain(deployment, workers, jobs)
        async with old_transaction(deployment.url):
            churned = 0
            for _ in range(CHURN):
                done = await drain(deployment, workers, jobs, WITHIN)
                churned += jobs
                if not done.whole:
                    break
            after = done if not done.whole else await drain(deployment, workers, jobs, WITHIN)
    run.part.add(name, before=before.rate, after=after.rate, churned=churned)


async def bench(run: Run) -> None:
    await run.in_turns(one, rounds=min(run.rounds, 3), suits=lambda peer: peer.pinned)
