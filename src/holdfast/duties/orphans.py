"""Settles orphans that no live worker has been able to reach for longer than the grace.

One whose supervisor must have stopped it by itself (`stop_after`) is lost, and `on_lost` decides. Of any other nobody
knows whether it still runs: it is paused for a person, or for a worker that reaches its domain again.
"""

from datetime import timedelta

from holdfast.store import Store
from holdfast.store.orphans import Orphan

BATCH = 100
MARGIN = 10.0
"""Seconds that a supervisor may take beyond `stop_after` and `stop_grace`: clocks drift, and killing takes a moment."""


async def run_once(store: Store, *, grace: float) -> int:
    """Settle one bounded batch; return how many jobs moved."""
    settled = 0
    for orphan in await store.leases.unreachable(grace, BATCH):
        if must_have_stopped(orphan):
            settled += await store.leases.lose(orphan) is not None
        else:
            settled += await store.leases.strand(orphan)
    return settled


def must_have_stopped(orphan: Orphan) -> bool:
    """Whether so much time has passed since the last heartbeat that the attempt stopped by itself."""
    policy = orphan.policy
    if policy.stop_after is None:
        return False
    return orphan.now_at > orphan.last_beat_at + timedelta(seconds=policy.stop_after + policy.stop_grace + MARGIN)
