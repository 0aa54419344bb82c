"""Claims that remember the last one: the short path for one tenant, and where the scan of a line starts."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from holdfast.model import FUNCTION_DOMAIN, Claimable, Lease, Outcome
from holdfast.store import Store, claims
from holdfast.store.notify import TopicSignal
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.store import connect
from tests.support.store_harness import TTL, StoreHarness

PAIRS = [Claimable(queue="default", capability=f"function:{name}", domain=FUNCTION_DOMAIN) for name in ("f", "g")]


async def claim(harness: StoreHarness, slots: int) -> Sequence[Lease]:
    return (await harness.store.leases.claim("w1", PAIRS, slots=slots, ttl=TTL)).claimed


@asynccontextmanager
async def neighbour(harness: StoreHarness) -> AsyncIterator[Store]:
    """Another process on the same database, as far as notifications go."""
    async with Store(await connect(harness.url)) as store:
        yield store


async def only_tenant_is_known(harness: StoreHarness) -> None:
    """Let worker w1 learn that `default` is the only tenant, so that its next claims are one statement."""
    for _ in range(3):
        await harness.submit()
        (lease,) = await claim(harness, 10)
        await harness.finish(lease)


async def test_second_tenant_gets_its_share_of_the_next_claim(harness: StoreHarness) -> None:
    """Also if its jobs are of another function than the backlog of the first tenant."""
    await only_tenant_is_known(harness)
    for _ in range(20):
        await harness.submit()
    mine = [await harness.submit(tenant="other", spec={"name": "g"}) for _ in range(10)]
    leases = await claim(harness, 10)
    assert sum(lease.tenant == "other" for lease in leases) == 5
    assert {lease.id for lease in leases if lease.tenant == "other"} <= {job.id for job in mine}


async def test_claims_end_when_only_the_other_tenant_had_work(harness: StoreHarness) -> None:
    await only_tenant_is_known(harness)
    job = await harness.submit(tenant="other")
    assert [lease.id for lease in await claim(harness, 10)] == [job.id]
    assert await claim(harness, 10) == []
    last = await harness.submit()
    assert [lease.id for lease in await claim(harness, 10)] == [last.id]


async def test_job_with_a_higher_priority_is_not_missed_in_the_middle_of_a_backlog(harness: StoreHarness) -> None:
    for _ in range(30):
        await harness.submit()
    await claim(harness, 10)
    async with neighbour(harness) as other:
        urgent = await other.jobs.submit({"runner": "function", "spec": {"name": "f"}, "priority": 5})
    assert urgent.id in {lease.id for lease in await claim(harness, 10)}


async def test_older_job_that_another_process_puts_back_is_claimed_at_once(harness: StoreHarness) -> None:
    """A worker that listens remembers where its last scan ended; a notification makes it scan from the start."""
    async with neighbour(harness) as own, neighbour(harness) as other, own.notifications.listening() as signal:
        if isinstance(own.database, PostgresDatabase):
            await heard(signal)
        old, *_ = [await harness.submit(), await harness.submit()]
        (lease,) = (await own.leases.claim("w1", PAIRS, slots=1, ttl=TTL)).claimed
        assert lease.id == old.id
        assert len((await own.leases.claim("w1", PAIRS, slots=10, ttl=TTL)).claimed) == 1
        await harness.advance(60)
        await harness.submit()
        assert len((await own.leases.claim("w1", PAIRS, slots=10, ttl=TTL)).claimed) == 1
        returns = own.notifications.returns
        await other.leases.finish([(lease, Outcome.failed("exit_nonzero", "boom", exit_code=1))])
        await other.jobs.resume(old.id)
        while own.notifications.returns == returns:
            await heard(signal)
        claimed = (await own.leases.claim("w1", PAIRS, slots=10, ttl=TTL)).claimed
        assert [lease.id for lease in claimed] == [old.id]


async def test_new_jobs_of_another_process_do_not_cause_a_scan_from_the_start(harness: StoreHarness) -> None:
    async with neighbour(harness) as own, neighbour(harness) as other, own.notifications.listening() as signal:
        if isinstance(own.database, PostgresDatabase):
            await heard(signal)
        returns = own.notifications.returns
        await other.jobs.submit({"runner": "function", "spec": {"name": "f"}})
        topics = await signal.wait(30.0)
        assert topics
        if "*" not in topics:  # SQLite tells other processes only that something changed.
            assert own.notifications.returns == returns


async def heard(signal: TopicSignal) -> None:
    """Wait for a notification. On Postgres the first one after the start says that everything may have changed."""
    assert await signal.wait(30.0)


async def test_position_is_dropped_after_some_time(harness: StoreHarness) -> None:
    """A job that is put back while its notification is lost is found by the next scan from the start."""
    for _ in range(4):
        await harness.submit()
    (old,) = await claim(harness, 1)
    await claim(harness, 1)
    async with neighbour(harness) as other:
        await other.leases.finish([(old, Outcome.failed("exit_nonzero", "boom", exit_code=1))])
        await other.jobs.resume(old.id)
    rotation = next(iter(harness.store.leases._claims._rotations.values()))
    assert any(position.after_id for position in rotation.positions.values())
    for key, position in rotation.positions.items():
        rotation.positions[key] = claims._Position(position.after_id, position.slack, 0.0, position.returns)
    assert [lease.id for lease in await claim(harness, 1)] == [old.id]
