"""The rows of workers: registration, the leader of a duty, drains."""

import pytest

from holdfast.errors import NotFound
from holdfast.model import new_worker_id
from tests.support.job_states import PROCESS
from tests.support.store_harness import TTL, StoreHarness


async def test_leader_is_one_and_the_next_takes_over(harness: StoreHarness) -> None:
    """Proves L10."""
    workers = harness.store.workers
    assert await workers.lead("reaper", "a", ttl=30) == 1
    assert await workers.lead("reaper", "b", ttl=30) is None
    assert await workers.lead("reaper", "a", ttl=30) == 1
    assert await workers.lead("pruner", "b", ttl=30) == 1
    await harness.advance(31)
    assert await workers.lead("reaper", "b", ttl=30) == 2
    assert await workers.lead("reaper", "a", ttl=30) is None
    await workers.resign("reaper", "b")
    assert await workers.lead("reaper", "a", ttl=30) == 3


async def test_worker_ids_are_never_reused_and_workers_are_listed_with_their_jobs(harness: StoreHarness) -> None:
    """Proves L14."""
    assert len({new_worker_id() for _ in range(1000)}) == 1000
    workers = harness.store.workers
    fields = {"queues": {"default": 4}, "capabilities": ["process"], "domains": ["host-a"], "ttl": TTL}
    await workers.register("w1", host="a", pid=7, **fields)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="never reused"):
        await workers.register("w1", host="b", pid=7, **fields)  # type: ignore[arg-type]
    job = await harness.submit(**PROCESS)
    (lease,) = await harness.claim_process()
    (worker,) = await workers.list()
    assert (worker.queues, worker.domains, worker.jobs, worker.live) == ({"default": 4}, ("host-a",), (job.id,), True)
    await workers.drain("w1")
    pulse = await harness.store.leases.beat("w1", [lease], ttl=TTL)
    assert (pulse.registered, pulse.draining) == (True, True)
    await harness.advance(TTL + 1)
    assert not (await workers.list())[0].live
    await workers.delete("w1")
    assert await workers.list() == []


async def test_drain_of_a_host_reaches_all_its_workers_and_no_other(harness: StoreHarness) -> None:
    """Proves C9."""
    workers = harness.store.workers
    for worker, host in (("w1", "a"), ("w2", "a"), ("w3", "b")):
        await workers.register(
            worker, host=host, pid=7, queues={"default": 4}, capabilities=["process"], domains=[host], ttl=TTL
        )
    assert await workers.drain_host("a") == ["w1", "w2"]
    pulses = [await harness.store.leases.beat(worker, [], ttl=TTL) for worker in ("w1", "w2", "w3")]
    assert [pulse.draining for pulse in pulses] == [True, True, False]
    with pytest.raises(NotFound, match="host c"):
        await workers.drain_host("c")
