"""What a pipeline records of its tasks, on a real store: nothing once its lease is lost."""

from typing import Any, cast

import pytest

from holdfast.model import Outputs
from holdfast.pipeline.plan import TaskPlan
from holdfast.pipeline.snapshots import CopiedFolder
from holdfast.worker.held_leases import LeaseLost
from holdfast.worker.task_store import TaskStore
from tests.support.store_harness import TTL, StoreHarness


async def test_snapshot_is_not_published_with_a_lost_lease(harness: StoreHarness) -> None:
    """Proves L4."""
    await harness.submit(runner="process", spec={"command": ["true"]})
    (lease,) = await harness.claim_process()
    await harness.advance(2 * TTL)
    await harness.store.leases.reap()
    task = TaskPlan(
        n=0, name="t", command=("true",), sql=None, files=(), env={}, timeout=None, parent="p" * 64, snapshot="s" * 64,
        hash="h", components={}, keep=True,
    )  # fmt: skip
    store = TaskStore(harness.store, lease, cast(Any, None))
    with pytest.raises(LeaseLost):
        await store.publish(task, CopiedFolder(folder="f", size=1, digest="d"), Outputs())
    with pytest.raises(LeaseLost):
        await store.lock(task.snapshot)
    assert await store.use(task.snapshot) is None
