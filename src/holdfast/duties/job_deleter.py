"""Deletes jobs whose deletion was requested, once they have ended: their files first, then their rows."""

from holdfast.store import Store

BATCH = 100


async def run_once(store: Store) -> int:
    """Finish one bounded batch of deletions; return how many jobs were deleted."""
    return await store.jobs.finish_deletions(BATCH)
