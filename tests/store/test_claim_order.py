"""Claims: which jobs a worker gets, in which order, and that a claim keeps its leases."""

from typing import Any

import pytest

from holdfast.errors import StoreUnreachable
from holdfast.model import Cause, Claimable, Outcome
from holdfast.store.store import Store, connect
from tests.support.job_states import PROCESS
from tests.support.store_harness import TTL, StoreHarness


async def test_claim_takes_jobs_in_order_of_priority_then_acceptance(harness: StoreHarness) -> None:
    """Proves J8."""
    low = await harness.submit(priority=-1)
    first = await harness.submit()
    second = await harness.submit()
    high = await harness.submit(priority=5)
    assert [lease.id for lease in await harness.claim()] == [high.id, first.id, second.id, low.id]


async def test_retry_keeps_its_place_once_due(harness: StoreHarness) -> None:
    """Proves J8."""
    first, second = await harness.submit(max_attempts=2), await harness.submit()
    (lease,) = await harness.claim(slots=1)
    await harness.finish(lease, Outcome.requeued(Cause.EXIT, delay=5))
    assert [lease.id for lease in await harness.claim(slots=1)] == [second.id]
    await harness.submit()
    await harness.advance(6)
    await harness.store.gates.promote()
    assert (await harness.claim(slots=1))[0].id == first.id


async def test_order_holds_across_the_functions_of_one_worker(harness: StoreHarness) -> None:
    """Proves J8."""
    jobs = [await harness.submit(spec={"name": name}) for name in ("f", "g", "f", "g", "g")]
    pairs = [Claimable(queue="default", capability=f"function:{name}", domain="function") for name in ("f", "g")]
    claimed = (await harness.store.leases.claim("w1", pairs, slots=3, ttl=TTL)).claimed
    assert [lease.id for lease in claimed] == [job.id for job in jobs[:3]]


async def test_claim_stays_within_free_slots(harness: StoreHarness) -> None:
    """Proves L2."""
    for _ in range(3):
        await harness.submit()
    assert len(await harness.claim(slots=2)) == 2
    assert len(await harness.claim(slots=0)) == 0
    assert len(await harness.claim(slots=5)) == 1


async def test_worker_claims_only_its_queues_and_what_it_can_run(harness: StoreHarness) -> None:
    """Proves J9, L21."""
    await harness.submit(queue="other")
    await harness.submit(spec={"name": "g"})
    await harness.submit(**PROCESS)
    mine = await harness.submit()
    assert [lease.id for lease in await harness.claim()] == [mine.id]


async def test_paused_queue_gives_nothing_until_resumed_even_after_a_restart(harness: StoreHarness) -> None:
    """Proves J9."""
    await harness.submit()
    other = await harness.submit(queue="other")
    await harness.store.queues.pause("default")
    async with Store(await connect(harness.url, listen=False, clock=harness.clock)) as restarted:
        pair = Claimable(queue="default", capability="function:f", domain="function")
        assert (await restarted.leases.claim("w9", [pair], slots=5, ttl=TTL)).claimed == []
        assert [(queue.queue, queue.paused) for queue in await restarted.queues.list()] == [("default", True)]
    assert [lease.id for lease in await harness.claim(queue="other")] == [other.id]
    await harness.store.queues.resume("default")
    assert len(await harness.claim()) == 1


def fail_after(database: Any, patch: pytest.MonkeyPatch, *, claims: int) -> None:
    """Let the store go away after so many statements that claim."""
    left = claims

    def counted(method: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise StoreUnreachable("gone")
            return await method(*args, **kwargs)

        return call

    for name in ("values", "transact"):
        patch.setattr(database, name, counted(getattr(database, name)))


@pytest.mark.parametrize("queue", ["capped", "default"])
async def test_claim_keeps_its_leases_when_the_store_fails_later(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    """Proves L7."""
    await harness.store.queues.limit("capped", cap=5)
    for tenant in ("a", "b"):  # Two tenants take turns, so another statement looks for more.
        await harness.submit(tenant=tenant, queue=queue)
    pairs = [Claimable(queue=name, capability="function:f", domain="function") for name in ("capped", "default")]
    with monkeypatch.context() as patch:
        fail_after(harness.store.database, patch, claims=0)
        with pytest.raises(StoreUnreachable):
            await harness.store.leases.claim("w1", pairs, slots=10, ttl=TTL)
    with monkeypatch.context() as patch:
        fail_after(harness.store.database, patch, claims=1)
        claimed = (await harness.store.leases.claim("w2", pairs, slots=10, ttl=TTL)).claimed
    assert sorted(lease.tenant for lease in claimed) == ["a", "b"]
    pulse = await harness.store.leases.beat("w2", claimed, ttl=TTL)
    assert [beat.answer for beat in pulse.jobs] == ["yours", "yours"]
