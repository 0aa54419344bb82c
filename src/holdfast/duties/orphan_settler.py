"""Settles orphaned functions as soon as they are due, and other orphans that no live worker reached within the grace.

An orphan with `stop_after` waits until its supervisor must have stopped it; then it is lost, and `on_lost` decides. Any
other may still run: its job is paused, until a person decides or a worker reaches it again.
"""

from datetime import timedelta

from holdfast.store import Store
from holdfast.store.orphans import Orphan

BATCH = 100
MARGIN = 10.0
"""Seconds allowed beyond `stop_after` and `stop_grace`: clocks drift, and killing takes a moment."""


async def settle_functions(store: Store) -> int:
    """Settle one bounded batch of functions whose worker is gone; return how many jobs changed.

    Workers adopt and settle them too. The duty is for when there is no worker: such a job would look as if it ran.
    """
    return sum(
        [await store.leases.settle_function(one) is not None for one in await store.leases.orphaned_functions(BATCH)]
    )


async def run_once(store: Store, *, grace: float) -> int:
    """Settle one bounded batch, skipping those that wait for their `stop_after`; return how many jobs changed."""
    settled = 0
    after: str | None = None
    while settled < BATCH and (page := await store.leases.unreachable(grace, BATCH, after=after)):
        after = page[-1].id
        for orphan in page:
            if must_have_stopped(orphan):
                settled += await store.leases.lose(orphan) is not None
            elif orphan.policy.stop_after is None:
                settled += await store.leases.strand(orphan)
    return settled


def must_have_stopped(orphan: Orphan) -> bool:
    """Return whether the last heartbeat is old enough that the supervisor must have stopped the attempt."""
    policy = orphan.policy
    if policy.stop_after is None:
        return False
    return orphan.now_at > orphan.last_beat_at + timedelta(seconds=policy.stop_after + policy.stop_grace + MARGIN)
