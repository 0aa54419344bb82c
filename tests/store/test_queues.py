"""Queues: caps over all workers, depth limits, and turns between tenants."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Invalid, QueueFull
from holdfast.model import FUNCTION_DOMAIN, Claimable, Outcome, Queue
from holdfast.store import Store
from holdfast.store.migrate import migrate
from holdfast.store.store import connect
from tests.support.store_harness import TTL, StoreHarness


async def test_cap_holds_over_all_workers_and_fails_no_claim(harness: StoreHarness) -> None:
    """Proves J10."""
    await harness.store.queues.limit("default", cap=3)
    for _ in range(5):
        await harness.submit()
    first = [*await harness.claim(2, worker="w1"), *await harness.claim(10, worker="w2")]
    assert len(first) == 3
    assert await harness.claim(worker="w3") == []
    await harness.finish(first[0])
    assert len(await harness.claim(worker="w3")) == 1
    assert {job.status for job in (await harness.store.jobs.list()).items} == {"queued", "running", "succeeded"}


async def test_orphan_counts_against_the_cap_and_its_adoption_needs_no_room(harness: StoreHarness) -> None:
    """Proves J10."""
    await harness.store.queues.limit("default", cap=1)
    await harness.submit()
    await harness.submit()
    (lease,) = await harness.claim()
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    assert await harness.claim(worker="w2") == []
    (adopted,) = await harness.adopt(worker="w2")
    assert adopted.id == lease.id
    assert await harness.claim(worker="w2") == []


async def test_cap_can_be_raised_and_lifted(harness: StoreHarness) -> None:
    """Proves J10."""
    for _ in range(6):
        await harness.submit()
    await harness.store.queues.limit("default", cap=1)
    assert len(await harness.claim()) == 1
    await harness.store.queues.limit("default", cap=3)
    assert len(await harness.claim()) == 2
    await harness.store.queues.limit("default")
    assert len(await harness.claim()) == 3
    assert await harness.store.queues.list() == [Queue(queue="default", paused=False, cap=None, depth=None)]


async def test_paused_queue_with_a_cap_gives_nothing(harness: StoreHarness) -> None:
    """Proves J10."""
    await harness.store.queues.limit("default", cap=3)
    await harness.store.queues.pause("default")
    await harness.submit()
    assert await harness.claim() == []
    await harness.store.queues.resume("default")
    assert len(await harness.claim()) == 1


async def test_other_queues_are_claimed_beside_a_capped_one(harness: StoreHarness) -> None:
    """Proves J10, L2."""
    await harness.store.queues.limit("heavy", cap=1)
    for queue in ("heavy", "heavy", "default", "default", "default"):
        await harness.submit(queue=queue)
    pairs = [Claimable(queue=q, capability="function:f", domain=FUNCTION_DOMAIN) for q in ("default", "heavy")]
    claimed = (await harness.store.leases.claim("w1", pairs, slots=10, ttl=TTL)).claimed
    assert sorted(lease.queue for lease in claimed) == ["default", "default", "default", "heavy"]


async def test_capped_queue_gets_its_share_beside_others(harness: StoreHarness) -> None:
    """Proves J10."""
    await harness.store.queues.limit("capped", cap=2)
    await harness.submit(queue="capped")
    for _ in range(20):
        await harness.submit()
    pairs = [Claimable(queue=q, capability="function:f", domain=FUNCTION_DOMAIN) for q in ("default", "capped")]
    taken = [
        lease.queue
        for _ in range(3)
        for lease in (await harness.store.leases.claim("w1", pairs, slots=2, ttl=TTL)).claimed
    ]
    assert taken.count("capped") == 1
    assert len(taken) == 6


@pytest.mark.parametrize("limits", [{"cap": 0}, {"depth": 0}, {"cap": -1}])
async def test_limits_below_one_are_refused(harness: StoreHarness, limits: dict[str, Any]) -> None:
    """Proves J10."""
    with pytest.raises(Invalid, match="below 1"):
        await harness.store.queues.limit("default", **limits)
    assert await harness.store.queues.list() == []


async def test_full_queue_refuses_a_batch_whole(harness: StoreHarness) -> None:
    """Proves J11."""
    await harness.store.queues.limit("default", depth=3)
    job = {"runner": "function", "spec": {"name": "f"}}
    await harness.store.jobs.submit_many([job, job])
    with pytest.raises(QueueFull, match="queue default is full: at most 3 jobs may wait in it"):
        await harness.store.jobs.submit_many([job, job])
    assert len((await harness.store.jobs.list()).items) == 2
    await harness.store.jobs.submit_many([{**job, "lane": "L"}, *[{**job, "queue": "other"}] * 5])
    with pytest.raises(QueueFull):
        await harness.submit()
    await harness.claim(1)
    await harness.submit()


async def test_depth_counts_jobs_that_wait_for_any_reason(harness: StoreHarness) -> None:
    """Proves J11."""
    await harness.store.queues.limit("default", depth=4)
    first = await harness.submit(hold=True)
    await harness.submit(needs=[first.id])
    await harness.submit(available_at=harness.later(60).isoformat())
    await harness.submit(lane="L")
    with pytest.raises(QueueFull):
        await harness.submit()
    await harness.store.jobs.cancel(first.id)
    assert await harness.submit() is not None


async def test_jobs_that_already_wait_count_against_a_new_depth_limit(harness: StoreHarness) -> None:
    """Proves J11."""
    for _ in range(3):
        await harness.submit()
    await harness.store.queues.limit("default", depth=3)
    with pytest.raises(QueueFull):
        await harness.submit()
    await harness.claim(1)
    await harness.submit()


async def test_backlog_of_one_tenant_does_not_delay_another(harness: StoreHarness) -> None:
    """Proves N5."""
    job = {"runner": "function", "spec": {"name": "f"}}
    await harness.store.jobs.submit_many([job] * 10_000, tenant="greedy")
    assert len(await harness.claim(4)) == 4
    other = await harness.submit(tenant="modest")
    assert other.id in {lease.id for lease in await harness.claim(4)}


async def test_tenants_take_turns_also_when_there_are_more_of_them_than_slots(harness: StoreHarness) -> None:
    """Proves N5."""
    tenants = [f"tenant-{n:02}" for n in range(7)]
    for tenant in tenants:
        for _ in range(3):
            await harness.submit(tenant=tenant)
    order = [lease.tenant for _ in range(21) for lease in await harness.claim(1)]
    assert [sorted(order[n : n + 7]) for n in (0, 7, 14)] == [tenants] * 3


async def test_claim_gives_each_tenant_an_equal_share_and_fills_up(harness: StoreHarness) -> None:
    """Proves N5, L2."""
    for tenant, jobs in (("a", 20), ("b", 20), ("c", 2)):
        for _ in range(jobs):
            await harness.submit(tenant=tenant)
    claimed = [lease.tenant for lease in await harness.claim(12)]
    assert len(claimed) == 12
    assert claimed.count("c") == 2
    assert {claimed.count("a"), claimed.count("b")} in ({5}, {4, 6})


async def test_turns_go_by_tenant_over_all_functions(harness: StoreHarness) -> None:
    """Proves N5."""
    old = [await harness.submit(tenant="zed") for _ in range(6)]
    newer = await harness.submit(tenant="zed", spec={"name": "g"})
    for _ in range(3):
        await harness.submit(tenant="bob")
    pairs = [Claimable(queue="default", capability=f"function:{name}", domain=FUNCTION_DOMAIN) for name in "fg"]
    order = [
        lease for _ in range(10) for lease in (await harness.store.leases.claim("w1", pairs, slots=1, ttl=TTL)).claimed
    ]
    assert [lease.tenant for lease in order] == ["bob", "zed"] * 3 + ["zed"] * 4
    assert [lease.id for lease in order if lease.tenant == "zed"] == [*(job.id for job in old), newer.id]


async def test_order_within_a_tenant_holds_over_its_functions(harness: StoreHarness) -> None:
    """Proves N5."""
    expected = {}
    for tenant in ("a", "b"):
        expected[tenant] = [
            (await harness.submit(tenant=tenant, priority=priority, spec={"name": name})).id
            for priority, name in ((9, "g"), (8, "f"), (7, "g"), (1, "f"), (0, "g"), (0, "f"))
        ]
    pairs = [Claimable(queue="default", capability=f"function:{name}", domain=FUNCTION_DOMAIN) for name in "fg"]
    taken: dict[str, list[str]] = {"a": [], "b": []}
    for _ in range(3):
        for lease in (await harness.store.leases.claim("w1", pairs, slots=4, ttl=TTL)).claimed:
            taken[lease.tenant].append(lease.id)
    assert taken == expected


async def test_job_that_comes_back_keeps_its_place_before_a_backlog(harness: StoreHarness) -> None:
    """Proves N5."""
    jobs = [await harness.submit(max_attempts=2) for _ in range(6)]
    (first,) = await harness.claim(1)
    (second,) = await harness.claim(1)
    assert [first.id, second.id] == [jobs[0].id, jobs[1].id]
    await harness.finish(first, Outcome.failed("boom", "boom"))
    await harness.store.jobs.resume(first.id)
    (again,) = await harness.claim(1)
    assert again.id == first.id


async def test_idle_claim_takes_no_write_lock(tmp_path: Path) -> None:
    """Proves J10, O5."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    database = await connect(url)
    await migrate(database)
    async with Store(database) as store:
        await store.queues.limit("capped", cap=1)
        pairs = [Claimable(queue=q, capability="function:f", domain=FUNCTION_DOMAIN) for q in ("default", "capped")]
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        async with asyncio.timeout(60):
            claimed = await store.leases.claim("w1", pairs, slots=4, ttl=TTL, domains=[FUNCTION_DOMAIN])
            assert (claimed.adopted, claimed.claimed) == ([], [])
            assert await store.leases.reap() == []
            assert await store.gates.promote() == 0
            assert await store.gates.resolve() == 0
            assert await store.next_due() is None
        other.execute("ROLLBACK")
        other.close()


async def test_turns_are_kept_per_queue_when_a_worker_claims_from_each(harness: StoreHarness) -> None:
    """Proves N5. One queue's turns must not be those of another."""
    for n in range(10):
        for tenant, queue in (("a", "one"), ("b", "one"), ("c", "two")):
            await harness.submit(tenant=tenant, queue=queue, labels={"n": str(n)})
    tenants = []
    for _ in range(6):
        for queue in ("one", "two"):
            (lease,) = await harness.claim(slots=1, queue=queue)
            if queue == "one":
                tenants.append(lease.tenant)
            await harness.finish(lease)
    assert tenants == ["a", "b"] * 3
