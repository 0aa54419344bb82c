"""Repairs gates that nothing else would ever open. Each repair is a bug, logged and counted in `gate_repairs`."""

from holdfast.store import Store

BATCH = 100


async def run_once(store: Store) -> int:
    """Repair stuck gates; return how many. If it is not 0, look at the log."""
    return await store.gates.repair(BATCH)
