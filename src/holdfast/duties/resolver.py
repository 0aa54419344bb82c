"""Resolves gates that a caller or worker left behind: it died, or submitted inside a transaction of its own."""

from holdfast.store import Store


async def run_once(store: Store) -> int:
    """Resolve and settle until nothing is left; return how much there was."""
    return await store.gates.resolve()
