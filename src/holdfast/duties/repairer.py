"""Looks for gates that nobody will ever open. Each one it mends is a bug, logged and counted in `gate_repairs`."""

from holdfast.store import Store

BATCH = 100


async def run_once(store: Store) -> int:
    """Mend stuck gates; return how many. Anything but 0 wants a look at the log."""
    return await store.gates.repair(BATCH)
