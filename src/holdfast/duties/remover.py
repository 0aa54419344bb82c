"""Removes what has served: jobs that were to be deleted, queued jobs past their queue timeout, workers long dead."""

from holdfast.store import Store

BATCH = 100
DEAD_SECONDS = 7 * 86_400.0
"""How long a dead worker's row is kept, for people to see; longer while something waits in its domains."""


async def run_once(store: Store) -> int:
    """Expire, purge and forget one bounded batch each; return how many jobs and workers were touched."""
    jobs = await store.jobs.expire(BATCH) + await store.jobs.purge(BATCH)
    return jobs + await store.workers.forget_long_dead(DEAD_SECONDS, BATCH)
