"""Removes the rows of workers that died long ago."""

from holdfast.store import Store

BATCH = 100
DEAD_SECONDS = 7 * 86_400.0
"""How long a dead worker's row is kept for operators; longer while a job waits in its domains."""


async def run_once(store: Store) -> int:
    """Remove one bounded batch of workers; return how many."""
    return await store.workers.prune(DEAD_SECONDS, BATCH)
