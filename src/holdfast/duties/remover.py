"""Removes jobs that are marked for deletion, and workers long dead; ends queued jobs past their queue timeout."""

from holdfast.store import Store

BATCH = 100
DEAD_SECONDS = 7 * 86_400.0
"""How long a dead worker's row is kept for operators; longer while a job waits in its domains."""


async def run_once(store: Store) -> int:
    """Expire, purge and forget one bounded batch each; return how many jobs and workers were affected."""
    jobs = await store.jobs.expire(BATCH) + await store.jobs.finish_deletions(BATCH)
    return jobs + await store.workers.prune(DEAD_SECONDS, BATCH)
