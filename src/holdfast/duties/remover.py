"""Removes jobs that were to be deleted once they ended, and ends queued jobs whose queue timeout has passed."""

from holdfast.store import Store

BATCH = 100


async def run_once(store: Store) -> int:
    """Expire and purge one bounded batch each; return how many jobs were touched."""
    return await store.jobs.expire(BATCH) + await store.jobs.purge(BATCH)
