"""Ends queued jobs that no worker claimed within their queue timeout."""

from holdfast.store import Store

BATCH = 100


async def run_once(store: Store) -> int:
    """End one bounded batch of jobs as timed out; return how many."""
    return await store.jobs.expire(BATCH)
