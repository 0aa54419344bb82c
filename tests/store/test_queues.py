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
from tests.support.store_fixture import TTL, Stage


async def test_cap_holds_over_all_workers_and_full_fails_nobody(stage: Stage) -> None:
    """Proves J10."""
    await stage.store.queues.limit("default", cap=3)
    for _ in range(5):
        await stage.submit()
    first = [*await stage.claim(2, worker="w1"), *await stage.claim(10, worker="w2")]
    assert len(first) == 3
    assert await stage.claim(worker="w3") == []
    await stage.finish(first[0])
    assert len(await stage.claim(worker="w3")) == 1
    assert {job.status for job in (await stage.store.jobs.list()).items} == {"queued", "running", "succeeded"}


async def test_orphan_counts_against_the_cap_and_its_adoption_needs_no_room(stage: Stage) -> None:
    """Proves J10."""
    await stage.store.queues.limit("default", cap=1)
    await stage.submit()
    await stage.submit()
    (lease,) = await stage.claim()
    await stage.advance(TTL + 1)
    await stage.store.leases.reap()
    assert await stage.claim(worker="w2") == []
    (adopted,) = await stage.adopt(worker="w2")
    assert adopted.id == lease.id
    assert await stage.claim(worker="w2") == []


async def test_cap_can_be_raised_and_lifted(stage: Stage) -> None:
    """Proves J10."""
    for _ in range(6):
        await stage.submit()
    await stage.store.queues.limit("default", cap=1)
    assert len(await stage.claim()) == 1
    await stage.store.queues.limit("default", cap=3)
    assert len(await stage.claim()) == 2
    await stage.store.queues.limit("default")
    assert len(await stage.claim()) == 3
    assert await stage.store.queues.list() == [Queue(queue="default", paused=False, cap=None, depth=None)]


async def test_paused_queue_with_a_cap_gives_nothing(stage: Stage) -> None:
    """Proves J10."""
    await stage.store.queues.limit("default", cap=3)
    await stage.store.queues.pause("default")
    await stage.submit()
    assert await stage.claim() == []
    await stage.store.queues.resume("default")
    assert len(await stage.claim()) == 1


async def test_other_queues_are_claimed_beside_a_capped_one(stage: Stage) -> None:
    """Proves J10, L2."""
    await stage.store.queues.limit("heavy", cap=1)
    for queue in ("heavy", "heavy", "default", "default", "default"):
        await stage.submit(queue=queue)
    pairs = [Claimable(queue=q, capability="function:f", domain=FUNCTION_DOMAIN) for q in ("default", "heavy")]
    claimed = (await stage.store.leases.claim("w1", pairs, slots=10, ttl=TTL)).claimed
    assert sorted(lease.queue for lease in claimed) == ["default", "default", "default", "heavy"]


async def test_capped_queue_does_not_live_off_what_others_leave(stage: Stage) -> None:
    """Proves J10."""
    await stage.store.queues.limit("capped", cap=2)
    await stage.submit(queue="capped")
    for _ in range(20):
        await stage.submit()
    pairs = [Claimable(queue=q, capability="function:f", domain=FUNCTION_DOMAIN) for q in ("default", "capped")]
    taken = [
        lease.queue
        for _ in range(3)
        for lease in (await stage.store.leases.claim("w1", pairs, slots=2, ttl=TTL)).claimed
    ]
    assert taken.count("capped") == 1
    assert len(taken) == 6


@pytest.mark.parametrize("limits", [{"cap": 0}, {"depth": 0}, {"cap": -1}])
async def test_limits_below_one_are_refused(stage: Stage, limits: dict[str, Any]) -> None:
    """Proves J10."""
    with pytest.raises(Invalid, match="below 1"):
        await stage.store.queues.limit("default", **limits)
    assert await stage.store.queues.list() == []


async def test_full_queue_refuses_a_batch_whole(stage: Stage) -> None:
    """Proves J11."""
    await stage.store.queues.limit("default", depth=3)
    job = {"runner": "function", "spec": {"name": "f"}}
    await stage.store.jobs.submit_many([job, job])
    with pytest.raises(QueueFull, match="queue default is full: at most 3 jobs may wait in it"):
        await stage.store.jobs.submit_many([job, job])
    assert len((await stage.store.jobs.list()).items) == 2
    await stage.store.jobs.submit_many([{**job, "lane": "L"}, *[{**job, "queue": "other"}] * 5])
    with pytest.raises(QueueFull):
        await stage.submit()
    await stage.claim(1)
    await stage.submit()


async def test_depth_counts_jobs_that_wait_for_any_reason(stage: Stage) -> None:
    """Proves J11."""
    await stage.store.queues.limit("default", depth=4)
    first = await stage.submit(hold=True)
    await stage.submit(needs=[first.id])
    await stage.submit(available_at=stage.later(60).isoformat())
    await stage.submit(lane="L")
    with pytest.raises(QueueFull):
        await stage.submit()
    await stage.store.jobs.cancel(first.id)
    assert await stage.submit() is not None


async def test_what_waits_when_a_depth_limit_is_set_counts(stage: Stage) -> None:
    """Proves J11."""
    for _ in range(3):
        await stage.submit()
    await stage.store.queues.limit("default", depth=3)
    with pytest.raises(QueueFull):
        await stage.submit()
    await stage.claim(1)
    await stage.submit()


async def test_backlog_of_one_tenant_does_not_delay_another(stage: Stage) -> None:
    """Proves N5."""
    job = {"runner": "function", "spec": {"name": "f"}}
    await stage.store.jobs.submit_many([job] * 10_000, tenant="greedy")
    assert len(await stage.claim(4)) == 4
    other = await stage.submit(tenant="modest")
    assert other.id in {lease.id for lease in await stage.claim(4)}


async def test_tenants_take_turns_also_when_there_are_more_of_them_than_slots(stage: Stage) -> None:
    """Proves N5."""
    tenants = [f"tenant-{n:02}" for n in range(7)]
    for tenant in tenants:
        for _ in range(3):
            await stage.submit(tenant=tenant)
    order = [lease.tenant for _ in range(21) for lease in await stage.claim(1)]
    assert [sorted(order[n : n + 7]) for n in (0, 7, 14)] == [tenants] * 3


async def test_claim_gives_each_tenant_an_equal_share_and_fills_up(stage: Stage) -> None:
    """Proves N5, L2."""
    for tenant, jobs in (("a", 20), ("b", 20), ("c", 2)):
        for _ in range(jobs):
            await stage.submit(tenant=tenant)
    claimed = [lease.tenant for lease in await stage.claim(12)]
    assert len(claimed) == 12
    assert claimed.count("c") == 2
    assert {claimed.count("a"), claimed.count("b")} in ({5}, {4, 6})


async def test_turns_go_by_tenant_over_all_functions(stage: Stage) -> None:
    """Proves N5."""
    old = [await stage.submit(tenant="zed") for _ in range(6)]
    newer = await stage.submit(tenant="zed", spec={"name": "g"})
    for _ in range(3):
        await stage.submit(tenant="bob")
    pairs = [Claimable(queue="default", capability=f"function:{name}", domain=FUNCTION_DOMAIN) for name in "fg"]
    order = [
        lease for _ in range(10) for lease in (await stage.store.leases.claim("w1", pairs, slots=1, ttl=TTL)).claimed
    ]
    assert [lease.tenant for lease in order] == ["bob", "zed"] * 3 + ["zed"] * 4
    assert [lease.id for lease in order if lease.tenant == "zed"] == [*(job.id for job in old), newer.id]


async def test_order_within_a_tenant_holds_over_its_functions(stage: Stage) -> None:
    """Proves N5."""
    expected = {}
    for tenant in ("a", "b"):
        expected[tenant] = [
            (await stage.submit(tenant=tenant, priority=priority, spec={"name": name})).id
            for priority, name in ((9, "g"), (8, "f"), (7, "g"), (1, "f"), (0, "g"), (0, "f"))
        ]
    pairs = [Claimable(queue="default", capability=f"function:{name}", domain=FUNCTION_DOMAIN) for name in "fg"]
    taken: dict[str, list[str]] = {"a": [], "b": []}
    for _ in range(3):
        for lease in (await stage.store.leases.claim("w1", pairs, slots=4, ttl=TTL)).claimed:
            taken[lease.tenant].append(lease.id)
    assert taken == expected


async def test_job_that_comes_back_keeps_its_place_before_a_backlog(stage: Stage) -> None:
    """Proves N5."""
    jobs = [await stage.submit(max_attempts=2) for _ in range(6)]
    (first,) = await stage.claim(1)
    (second,) = await stage.claim(1)
    assert [first.id, second.id] == [jobs[0].id, jobs[1].id]
    await stage.finish(first, Outcome.failed("boom", "boom"))
    await stage.store.jobs.resume(first.id)
    (again,) = await stage.claim(1)
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
        async with asyncio.timeout(10):
            claimed = await store.leases.claim("w1", pairs, slots=4, ttl=TTL, domains=[FUNCTION_DOMAIN])
            assert (claimed.adopted, claimed.claimed) == ([], [])
            assert await store.leases.reap() == []
            assert await store.gates.promote() == 0
            assert await store.gates.resolve() == 0
            assert await store.next_due() is None
        other.execute("ROLLBACK")
        other.close()


async def test_turns_are_kept_per_queue_when_a_worker_claims_from_each(stage: Stage) -> None:
    """Proves N5. One queue's turns must not be those of another."""
    for n in range(10):
        for tenant, queue in (("a", "one"), ("b", "one"), ("c", "two")):
            await stage.submit(tenant=tenant, queue=queue, labels={"n": str(n)})
    tenants = []
    for _ in range(6):
        for queue in ("one", "two"):
            (lease,) = await stage.claim(slots=1, queue=queue)
            if queue == "one":
                tenants.append(lease.tenant)
            await stage.finish(lease)
    assert tenants == ["a", "b"] * 3
