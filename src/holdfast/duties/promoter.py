"""Lets delayed jobs and retries out of the future when they are due."""

from holdfast.store import Store

BATCH = 1000


async def run_once(store: Store) -> int:
    """Promote what is due; return how many. A full batch means: again at once."""
    return await store.gates.promote(BATCH)
