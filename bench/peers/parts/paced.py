"""400 jobs a second without a backlog: before, and at the end of 150 s under an old transaction.

For every peer the delay between submit and start, at a worker process. For holdfast also the claim itself.
"""

import asyncio
import time

from bench.figures import percentile
from bench.installation import until
from bench.peers.drains import warm
from bench.peers.old_transaction import old_transaction
from bench.peers.parts.pickup import delays
from bench.peers.peer import Peer
from bench.peers.run import Run
from bench.scale import SLOTS, database
from bench.store import PAIRS, RESULT, submissions
from holdfast.model import Outcome
from holdfast.store.store import Store

RATE, BATCH = 400.0, 20
BEFORE, PINNED, WINDOW = 20.0, 150.0, 20.0
SHORT = 0.1
"""Of these times, in a run of fewer than 10,000 jobs."""


def scale(run: Run) -> float:
    return 1.0 if run.jobs >= 10_000 else SHORT


def window(found: list[tuple[int, float]], start: int, seconds: float) -> tuple[float, float]:
    """The rate of starts and the median delay in ms of the jobs submitted in a window."""
    end = start + seconds * 1e9
    inside = [(at, delay) for at, delay in found if start <= at < end]
    started = [at + delay * 1e6 for at, delay in found]
    rate = sum(start <= at < end for at in started) / seconds
    return rate, percentile([delay for _, delay in inside], 0.5) if inside else float("inf")


async def one(run: Run, name: str, peer: Peer) -> None:
    before, pinned, last = (seconds * scale(run) for seconds in (BEFORE, PINNED, WINDOW))
    async with run.deployments.fresh(peer) as deployment, deployment.workers(1):
        await warm(deployment, 50)
        began = time.monotonic_ns()
        await deployment.tell("paced", rate=RATE, seconds=before)
        async with old_transaction(deployment.url):
            await deployment.tell("paced", rate=RATE, seconds=pinned)
            ended = time.monotonic_ns()
            expected = int((before + pinned) * RATE / BATCH) * BATCH * 0.99
            try:
                await until("the last stamps", lambda: len(delays(deployment.stamps)) >= expected, within=15, look=0.2)
            except RuntimeError:
                print(f"  {name}: did not keep up with {RATE:g} jobs/s", flush=True)
        found = delays(deployment.stamps)
    rate, p50 = window(found, began, before)
    late_rate, late_p50 = window(found, int(ended - last * 1e9), last)
    values = {"rate_before": rate, "p50_before_ms": p50, "rate_after": late_rate}
    run.part.add(name, **values, p50_after_ms=min(late_p50, (pinned + 15) * 1e3))


async def claim_times(store: Store, seconds: float) -> list[tuple[float, float, int]]:
    """Submit 20 jobs every 50 ms and claim and finish what is there: when, the ms of each claim, and its jobs."""
    found: list[tuple[float, float, int]] = []
    over = time.monotonic() + seconds

    async def submit() -> None:
        began = time.monotonic()
        for n in range(int(seconds * RATE / BATCH)):
            await asyncio.sleep(max(0.0, began + n * BATCH / RATE - time.monotonic()))
            await store.jobs.submit_many(submissions(BATCH))

    async def work() -> None:
        while time.monotonic() < over:
            started = time.monotonic()
            claimed = await store.leases.claim("w", PAIRS, slots=SLOTS, ttl=60, domains=["function"])
            took = time.monotonic() - started
            if claimed.claimed:
                await store.leases.finish([(lease, Outcome.succeeded(RESULT)) for lease in claimed.claimed])
                found.append((started, took * 1e3, len(claimed.claimed)))
            else:
                await asyncio.sleep(0.005)

    await asyncio.gather(submit(), work())
    return found


async def store_claims(run: Run) -> None:
    before, pinned, last = (seconds * scale(run) for seconds in (BEFORE, PINNED, WINDOW))
    postgres = run.deployments.keepers.postgres
    async with database(postgres.url, "paced_claims") as (url, store):
        early = await claim_times(store, before)
        async with old_transaction(url):
            found = await claim_times(store, pinned)
            end = time.monotonic()
    await postgres.drop("paced_claims")
    late = [(took, jobs) for at, took, jobs in found if at > end - last]
    run.part.add(
        "holdfast",
        claim_before_ms=percentile([took for _, took, _ in early], 0.5),
        claim_after_ms=percentile([took for took, _ in late], 0.5),
        claimed_before=sum(jobs for _, _, jobs in early) / before,
        claimed_after=sum(jobs for _, jobs in late) / last,
    )


async def bench(run: Run) -> None:
    if "holdfast" in run.peers:
        await store_claims(run)
    await run.in_turns(one, rounds=1, suits=lambda peer: peer.pinned)
