"""Pruner: removes jobs past their retention period, step by step, idempotency keys older than a day, and idle lanes.

It also removes old entries of the audit trail.
"""

import time

from holdfast.store import Store
from holdfast.store.retention import Retention

REST = 4.0
"""The pause after a step, as a multiple of its duration: pruning takes at most a fifth of a connection's time."""


class Pruner:
    """Walks through all jobs, a bounded step per call, then starts over. Safe with two leaders.

    `rest` is how long to pause before the next step, so that other work is not delayed.
    """

    def __init__(self, store: Store, retention: Retention, *, audit_age: float | None = None) -> None:
        """`audit_age` is in seconds; without it the audit trail is not pruned."""
        self._store = store
        self._retention = retention
        self._audit_age = audit_age
        self._after: str | None = None
        self.rest = 0.0

    @property
    def at_end(self) -> bool:
        """Whether the next step starts over."""
        return self._after is None

    async def run_once(self) -> int:
        """Prune one step; return how many jobs were removed."""
        started = time.monotonic()
        await self._store.pruning.prune_keys()
        await self._store.pruning.prune_lanes()
        if self._audit_age is not None:
            await self._store.audit.prune(self._audit_age)
        pruned = await self._store.pruning.prune(self._retention, after=self._after)
        self._after = pruned.next_after
        self.rest = REST * (time.monotonic() - started)
        return len(pruned.removed)
