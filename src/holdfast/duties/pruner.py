"""Pruner: removes jobs that are over their retention, step by step, and idempotency keys that are a day old."""

from holdfast.store import Store
from holdfast.store.retention import Retention


class Pruner:
    """Goes along all jobs, a bounded step per call, and begins anew at the end. Safe with two leaders."""

    def __init__(self, store: Store, retention: Retention) -> None:
        self._store = store
        self._retention = retention
        self._after: str | None = None

    async def run_once(self) -> int:
        """Return how many jobs went."""
        await self._store.retain.forget_keys()
        pruned = await self._store.retain.prune(self._retention, after=self._after)
        self._after = pruned.next_after
        return len(pruned.removed)
