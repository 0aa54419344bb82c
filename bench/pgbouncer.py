"""What PgBouncer in transaction mode costs: claim and finish through it against direct, in turns, in one run.

Run by `make bench-pgbouncer`, with fsync on. A full batch shows the throughput, a single job the
price of the round trips.
"""

import asyncio
import statistics
import time

from tests.support.cluster import cluster
from tests.support.pgbouncer import pgbouncer

from bench.store import CONNECTIONS, PAIRS, RESULT, drain_all, submissions, timed
from holdfast.model import Outcome
from holdfast.store.migrate import migrate
from holdfast.store.store import Store, connect

JOBS = 5_000
SINGLES = 200
ROUNDS = 5


async def singles(store: Store) -> float:
    """Milliseconds of one claim and one finish of one job, by one worker alone."""
    spent = []
    for _ in range(SINGLES):
        started = time.perf_counter()
        (lease,) = (await store.leases.claim("worker", PAIRS, slots=1, ttl=60, domains=["function"])).claimed
        await store.leases.finish([(lease, Outcome.succeeded(RESULT))])
        spent.append(1000 * (time.perf_counter() - started))
    return statistics.median(spent)


async def main() -> None:
    with cluster(settings=()) as url, pgbouncer(url) as pooler:
        database = await connect(url, connections=CONNECTIONS, listen=False)
        await migrate(database)
        pooled = await connect(pooler, connections=CONNECTIONS, listen=False, pooler="transaction")
        rates: dict[str, list[float]] = {"direct": [], "through PgBouncer": []}
        waits: dict[str, list[float]] = {name: [] for name in rates}
        async with Store(database) as ours, Store(pooled) as theirs:
            for _ in range(ROUNDS):
                for name, store in zip(rates, (ours, theirs), strict=True):
                    await store.jobs.submit_many(submissions(JOBS))
                    rates[name].append(await timed(JOBS, drain_all(store, JOBS)))
                    await store.jobs.submit_many(submissions(SINGLES))
                    waits[name].append(await singles(store))
    print(f"{'claim + finish':<20} {'100 + 100, jobs/s':>20} {'1 + 1, ms':>12}   (median of {ROUNDS} rounds, fsync on)")
    for (name, rate), wait in zip(rates.items(), waits.values(), strict=True):
        print(f"{name:<20} {statistics.median(rate):>20,.0f} {statistics.median(wait):>12.2f}")
    (direct, through), (alone, waits_pooled) = rates.values(), waits.values()
    ratio = statistics.median(t / d for t, d in zip(through, direct, strict=True))
    longer = statistics.median(b / a for b, a in zip(waits_pooled, alone, strict=True))
    print(f"{'ratio':<20} {ratio:>20.2f} {longer:>12.2f}")


if __name__ == "__main__":
    asyncio.run(main())
