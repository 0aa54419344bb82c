"""Bulk submit of 10,000 in the peer's best call, and single submits one after the other."""

from bench.peers.peer import Peer
from bench.peers.run import Run

BULK, SINGLES, WARM = 10_000, 500, 100


async def one(run: Run, name: str, peer: Peer) -> None:
    bulk, singles = min(BULK, run.jobs), min(SINGLES, run.jobs)
    async with run.deployments.fresh(peer) as deployment:
        await deployment.submit_bulk(WARM)
        await deployment.submit_singles(WARM)
        await deployment.probe.settle()
        run.part.add(
            name,
            bulk=bulk / await deployment.submit_bulk(bulk),
            single=singles / await deployment.submit_singles(singles),
        )


async def bench(run: Run) -> None:
    await run.in_turns(one)
