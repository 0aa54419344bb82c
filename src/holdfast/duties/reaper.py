"""Clears leases that expired, and pauses orphans that wear out every adopter."""

from holdfast.store import Store

BATCH = 500


async def run_once(store: Store) -> int:
    """Reap one bounded batch; return how many leases were cleared."""
    reaped = await store.leases.reap(limit=BATCH)
    await store.leases.abandon()
    return len(reaped)
