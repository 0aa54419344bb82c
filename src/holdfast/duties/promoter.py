"""Promotes delayed jobs and retries when they are due."""

from holdfast.store import Store

BATCH = 1000


async def run_once(store: Store) -> int:
    """Promote due jobs; return how many. After a full batch, call again at once."""
    return await store.gates.promote(BATCH)
