"""Resolves gates that a caller or worker left unresolved: it died, or submitted in a transaction of its own."""

from holdfast.store import Store


async def run_once(store: Store) -> int:
    """Resolve and settle until nothing is left; return how many jobs that were."""
    return await store.gates.resolve()
