"""What an open transaction that submitted makes others wait for, and what it does not."""

import asyncio
from contextlib import AsyncExitStack

import asyncpg
import pytest

import holdfast
from holdfast.errors import (
    QueueFull,
)
from holdfast.model import Claimable, Status
from holdfast.store import gates, open_store
from tests.support.store_harness import StoreHarness
from tests.support.submit_drivers import (
    GUARD,
    JOB,
    ONE_EACH,
    SubmitDriver,
    open_caller,
    rows_left,
    until_one_waits_for_a_lock,
)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "connection over psycopg", "async session over asyncpg"])
async def test_idle_transaction_after_a_submit_into_a_lane_blocks_nothing(
    harness: StoreHarness, caller: SubmitDriver
) -> None:
    """Proves J13."""
    first = await harness.submit(lane="L")
    parent = await harness.submit()
    (idle,) = await caller.submit({**JOB, "lane": "L", "needs": [first.id, parent.id], "reuse_key": "R"}, key="K")
    async with asyncio.timeout(GUARD):
        second, third = await harness.submit(lane="L"), await harness.submit(lane="L", needs=[parent.id])
        await harness.store.jobs.accept([{**JOB, "lane": "L", "reuse_key": "other"}], key="other")
        await harness.store.gates.resolve()
        leases = {lease.id: lease for lease in await harness.claim()}
        assert set(leases) == {first.id, parent.id}
        assert await harness.finish(leases[first.id]) is Status.SUCCEEDED
        assert await harness.finish(leases[parent.id]) is Status.SUCCEEDED
        await harness.store.gates.resolve()
        assert (await harness.run_one()).id == second.id
        assert (await harness.store.jobs.cancel(third.id)).outcome == "ended"
        await harness.store.jobs.delete(second.id)
        await harness.store.lanes.pause("L")
        await harness.store.lanes.resume("L")
        await harness.run_one()
        await harness.store.gates.resolve()
    await caller.commit()
    await harness.store.gates.resolve()
    assert [lease.id for lease in await harness.claim()] == [idle.id]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "session over psycopg", "async connection over asyncpg"])
@pytest.mark.parametrize("first_commits", [True, False])
async def test_same_keys_wait_and_then_join_or_replay(
    harness: StoreHarness, caller: SubmitDriver, driver: str, first_commits: bool
) -> None:
    """Proves J12, J13, N7."""
    for options, job in [({}, {**JOB, "reuse_key": "R"}), ({"key": "K"}, JOB)]:
        (mine,) = await caller.submit(job, **options)
        async with open_caller(driver, harness.url) as other:
            waiting = asyncio.create_task(other.submit(job, **options))
            await until_one_waits_for_a_lock(harness)
            await (caller.commit() if first_commits else caller.rollback())
            async with asyncio.timeout(GUARD):
                (theirs,) = await waiting
            await other.commit()
        assert theirs.reused is first_commits
        assert (theirs.id == mine.id) is first_commits
    assert len((await harness.store.jobs.list()).items) == 2


@pytest.mark.parametrize("driver", ONE_EACH)
async def test_ten_parallel_submits_of_one_reuse_key_build_once(harness: StoreHarness, driver: str) -> None:
    """Proves J13, N7."""

    async def one(caller: SubmitDriver) -> tuple[str, bool]:
        (accepted,) = await caller.submit({**JOB, "reuse_key": "R"})
        await caller.commit()
        return accepted.id, accepted.reused

    async with AsyncExitStack() as stack:
        drivers = [await stack.enter_async_context(open_caller(driver, harness.url)) for _ in range(10)]
        answers = await asyncio.gather(*map(one, drivers))
    assert len({job_id for job_id, _ in answers}) == 1
    assert sorted(reused for _, reused in answers) == [False] + [True] * 9
    assert await rows_left(harness) == {"jobs": 1, "specs": 1, "reuse": 1}


@pytest.mark.parametrize("driver", ["asyncpg"])
async def test_open_transactions_may_overshoot_a_depth_limit_but_never_wait_for_it(
    harness: StoreHarness, caller: SubmitDriver, driver: str
) -> None:
    """Proves J11, J13."""
    await harness.store.queues.limit("small", depth=1)
    job = {**JOB, "queue": "small"}
    async with open_caller(driver, harness.url) as other, asyncio.timeout(GUARD):
        await caller.submit(job)
        await other.submit(job)
        await caller.commit()
        await other.commit()
        with pytest.raises(QueueFull):
            await other.submit(job)
        await other.rollback()


@pytest.mark.parametrize("kind", ["postgres"])
async def test_open_transaction_with_a_reuse_key_holds_up_no_heartbeat(clean_url: str) -> None:
    """Proves J13, L8."""
    async with await open_store(clean_url, listen=False) as store:
        job = {"runner": "function", "spec": {"name": "f"}}
        (keyed,) = await store.jobs.submit_many([{**job, "lane": "L", "reuse_key": "k"}])
        await store.jobs.cancel(keyed)
        await store.jobs.submit_many([{**job, "lane": "L"}, job])
        pair = Claimable(queue="default", capability="function:f", domain="function")
        leases = (await store.leases.claim("w1", [pair], slots=9, ttl=60)).claimed
        connection = await asyncpg.connect(clean_url)
        transaction = connection.transaction()
        await transaction.start()
        await holdfast.submit_inside_async(connection, [{**job, "reuse_key": "k"}])
        resume = asyncio.create_task(store.jobs.resume(keyed))
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        watcher = await asyncpg.connect(clean_url)
        async with asyncio.timeout(60):
            while not await watcher.fetchval(waiting):
                pass  # Until the resume waits for the key.
            pulse = await store.leases.beat("w1", leases, ttl=60)
        assert {beat.answer for beat in pulse.jobs} == {"yours"}
        await transaction.rollback()
        assert (await resume).status is Status.QUEUED
        await watcher.close()
        await connection.close()


@pytest.mark.parametrize("kind", ["postgres"])
async def test_open_transaction_with_a_reuse_key_delays_only_the_dependants_that_want_it(
    clean_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves J13, N7."""
    monkeypatch.setattr(gates, "KEY_SECONDS", 1)
    async with await open_store(clean_url, listen=False) as store:
        job = {"runner": "function", "spec": {"name": "f"}}
        parent, other = await store.jobs.submit_many([job, job])
        (keyed,) = await store.jobs.submit_many([{**job, "needs": [parent], "reuse_key": "k"}])
        (plain,) = await store.jobs.submit_many([{**job, "needs": [other]}])
        for job_id in (parent, other):
            await store.jobs.cancel(job_id)
        connection = await asyncpg.connect(clean_url)
        transaction = connection.transaction()
        await transaction.start()
        await holdfast.submit_inside_async(connection, [{**job, "reuse_key": "k"}])
        async with asyncio.timeout(60):
            await store.jobs.resume(parent)  # lands, and leaves its dependant for later
            await store.jobs.resume(other)
        assert (await store.jobs.get(plain)).status is Status.QUEUED
        assert (await store.jobs.get(keyed)).status is Status.FAILED
        await transaction.rollback()
        await connection.close()
        await store.gates.resolve()
        assert (await store.jobs.get(keyed)).status is Status.QUEUED
