"""Pruner: removes jobs that are over their retention, step by step, idempotency keys that are a day old, idle lanes."""

import time

from holdfast.store import Store
from holdfast.store.retention import Retention

REST = 4.0
"""How much longer than a step the pause after it should be: a prune may take a fifth of a connection, not more."""


class Pruner:
    """Goes along all jobs, a bounded step per call, and begins anew at the end. Safe with two leaders.

    `rest` says how long to pause before the next step, so that the work of others goes on beside it.
    """

    def __init__(self, store: Store, retention: Retention) -> None:
        self._store = store
        self._retention = retention
        self._after: str | None = None
        self.rest = 0.0

    @property
    def at_end(self) -> bool:
        """Whether the next step begins anew."""
        return self._after is None

    async def run_once(self) -> int:
        """Return how many jobs went."""
        started = time.monotonic()
        await self._store.retain.forget_keys()
        await self._store.retain.forget_lanes()
        pruned = await self._store.retain.prune(self._retention, after=self._after)
        self._after = pruned.next_after
        self.rest = REST * (time.monotonic() - started)
        return len(pruned.removed)
