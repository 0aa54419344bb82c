"""Adoption: which worker may adopt an orphan, how often, and what the record says about it."""

import pytest

from holdfast.model import Cause, Claimable, Outcome, Phase, Status, StopKind, StopPhase
from tests.store.test_leases import RETRY
from tests.support.job_states import PROCESS, orphan
from tests.support.store_harness import TTL, StoreHarness


async def test_adoption_comes_before_any_claim_and_needs_no_slot(harness: StoreHarness) -> None:
    """Proves L3, L4."""
    dead = await orphan(harness)
    await harness.submit(**PROCESS, priority=100)
    pair = Claimable(queue="default", capability="process", domain="host-a")
    full = await harness.store.leases.claim("w2", [pair], slots=0, ttl=TTL, domains=["host-a"])
    assert [lease.id for lease in full.adopted] == [dead.id]
    assert full.claimed == []
    adopted = full.adopted[0]
    assert adopted.attempt == dead.attempt
    assert adopted.token == dead.token + 2  # one for the reaper, one for the adopter
    assert (await harness.get(dead)).attempts == 1


async def test_orphan_is_adopted_only_where_its_domain_can_be_reached(harness: StoreHarness) -> None:
    """Proves L3."""
    dead = await orphan(harness)
    assert await harness.adopt(domains=["host-b", "function"]) == []
    assert [lease.id for lease in await harness.adopt(domains=["host-b", "host-a"])] == [dead.id]


async def test_orphan_that_wears_out_five_adopters_is_paused_for_a_person(harness: StoreHarness) -> None:
    """Proves L3."""
    dead = await orphan(harness, lane="L")
    waits = []
    for n in range(5):
        wait = 0.0
        while not (adopted := await harness.adopt(worker=f"w{n}")):
            await harness.advance(1)
            wait += 1
        waits.append(wait)
        assert adopted[0].adoption.adoptions == n + 1
        await harness.advance(TTL + 1)
        await harness.store.leases.reap(base=2, cap=9)
    assert waits == [0, 2, 4, 8, 9]
    assert await harness.store.leases.abandon() == 1
    job = await harness.get(dead)
    assert (job.status, job.error and job.error.code) == (Status.PAUSED, "internal")
    assert (await harness.store.lanes.get("L")).blockers == (dead.id,)


async def test_progress_ends_the_count_of_adoptions(harness: StoreHarness) -> None:
    """Proves L3."""
    await orphan(harness)
    for _ in range(6):
        await harness.advance(600)
        (lease,) = await harness.adopt()
        assert lease.adoption.adoptions == 1
        await harness.store.events.append(
            lease,
            lease.adoption.batch + 1,
            [],
            offsets=(lease.adoption.batch + 1, 0),
            old_offsets=(lease.adoption.stdout_offset, 0),
        )
        await harness.advance(TTL + 1)
        await harness.store.leases.reap()
    assert await harness.store.leases.abandon() == 0


@pytest.mark.parametrize("same_worker", [True, False])
async def test_stale_token_changes_nothing_after_adoption(harness: StoreHarness, same_worker: bool) -> None:
    """Proves L4, L9."""
    old = await orphan(harness)
    (new,) = await harness.adopt(worker="w1" if same_worker else "w2")
    before, events = await harness.get(old), await harness.events(old)
    leases = harness.store.leases
    assert (await leases.beat("w1", [old], ttl=TTL)).jobs[-1].answer == "lost"
    assert await leases.finish([(old, Outcome.succeeded())]) == {old.id: None}
    assert await leases.finish([(old, RETRY)]) == {old.id: None}
    assert await leases.start([old]) == frozenset()
    assert await leases.hand_over([old]) == frozenset()
    assert not await leases.advance_stop(old, StopPhase.SIGNALLED)
    appended = await harness.store.events.append(old, 1, [], offsets=(1, 0), old_offsets=(0, 0))
    assert appended.answer == "lost"
    assert (await harness.get(old), await harness.events(old)) == (before, events)
    assert await harness.finish(new) is Status.SUCCEEDED


async def test_worker_killed_between_claim_and_start_leaves_the_attempt_to_its_adopter(harness: StoreHarness) -> None:
    """Proves L13."""
    job = await harness.submit(**PROCESS)
    (old,) = await harness.claim_process()
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    (new,) = await harness.adopt()
    assert (new.attempt, new.adoption.phase) == (1, Phase.CLAIMED)
    assert await harness.store.leases.start([old]) == frozenset()
    assert await harness.store.leases.start([new]) == {job.id}
    await harness.finish(new)
    assert (await harness.get(job)).attempts == 1
    assert len(await harness.store.attempts.list(job.id)) == 1


async def test_hand_over_lets_the_next_worker_adopt_at_once(harness: StoreHarness) -> None:
    """Proves L4."""
    job = await harness.submit(**PROCESS)
    (lease,) = await harness.claim_process()
    await harness.store.leases.start([lease])
    assert await harness.store.leases.hand_over([lease]) == {job.id}
    assert await harness.finish(lease) is None
    (adopted,) = await harness.adopt()
    assert (adopted.attempt, adopted.adoption.phase, adopted.token) == (1, Phase.STARTED, lease.token + 2)
    kinds = [event.data.get("lease") for event in await harness.events(job) if event.type == "lease"]
    assert kinds == ["handed_over", "adopted"]


async def test_stop_request_is_seen_by_poll_and_carried_to_the_adopter(harness: StoreHarness) -> None:
    """Proves C1, C2."""
    job = await harness.submit(**PROCESS)
    (lease,) = await harness.claim_process()
    answer = await harness.store.jobs.cancel(job.id)
    assert answer.outcome == "stopping"
    # Before the start: the worker looks and starts nothing.
    assert (await harness.store.leases.stop_requests("w1"))[job.id].kind is StopKind.CANCEL
    assert await harness.store.leases.advance_stop(lease, StopPhase.SIGNALLED, grace=5)
    await harness.store.leases.hand_over([lease])
    (adopted,) = await harness.adopt()
    assert adopted.adoption.stop_request is not None
    assert adopted.adoption.stop_request.phase is StopPhase.SIGNALLED
    assert adopted.adoption.stop_request.deadline_at == harness.later(5)


async def test_events_name_the_worker_that_lost_the_lease(harness: StoreHarness) -> None:
    """Proves L10."""
    await harness.submit(**PROCESS)
    (lease,) = await harness.claim_process(worker="w1")
    await harness.store.leases.hand_over([lease])
    (lease,) = await harness.adopt(worker="w2", domains=["host-a"])
    await harness.store.leases.hand_over([lease])
    (lease,) = await harness.adopt(worker="w3", domains=["host-a"])
    await harness.advance(TTL + 1)
    (reaped,) = await harness.store.leases.reap()
    assert reaped.worker == "w3"
    holders = [
        (event.data["lease"], event.data["worker"]) for event in await harness.events(lease) if event.type == "lease"
    ]
    assert holders == [
        *(("handed_over", "w1"), ("adopted", "w2"), ("handed_over", "w2")),
        *(("adopted", "w3"), ("reaped", "w3")),
    ]


async def test_attempt_names_the_worker_that_began_and_the_one_that_finished_it(harness: StoreHarness) -> None:
    """After an adoption the record tells who began an attempt and who ended it."""
    job = await harness.submit(runner="process", spec={"command": ["x"]}, max_attempts=3)
    (lease,) = await harness.claim_process(worker="w1")
    (attempt,) = await harness.store.attempts.list(job.id)
    assert (attempt.worker, attempt.last_worker) == ("w1", "w1")
    for name in ("w2", "w3"):
        await harness.store.leases.hand_over([lease])
        (lease,) = await harness.adopt(worker=name)
        (attempt,) = await harness.store.attempts.list(job.id)
        assert (attempt.worker, attempt.last_worker) == ("w1", name)
    await harness.finish(lease, Outcome.requeued(Cause.EXIT))
    (lease,) = await harness.claim_process(worker="w4")
    assert await harness.finish(lease) is Status.SUCCEEDED
    workers = [(one.worker, one.last_worker) for one in await harness.store.attempts.list(job.id)]
    assert workers == [("w1", "w3"), ("w4", "w4")]


async def test_lost_attempt_names_the_worker_that_had_it_last(harness: StoreHarness) -> None:
    """Who held an attempt last stays known when nobody ends it: by a duty, or by a person."""
    jobs = [await harness.submit(runner="process", spec={"command": ["x"]}) for _ in range(2)]
    leases = await harness.claim_process(worker="w1")
    await harness.store.leases.start(leases)
    await harness.store.leases.hand_over(leases)
    await harness.adopt(worker="w2")
    await harness.store.leases.orphan("w2")
    first, second = await harness.store.leases.open_in(["host-a"])
    await harness.store.leases.lose(first)
    await harness.store.leases.strand(second)
    await harness.store.jobs.resume(second.id, stopped=True)
    for job in jobs:
        (attempt,) = await harness.store.attempts.list(job.id)
        assert (attempt.worker, attempt.last_worker) == ("w1", "w2")


async def test_a_silent_job_may_be_handed_over_as_often_as_workers_are_replaced(harness: StoreHarness) -> None:
    """Only adopters that died or failed at it count, and not after ten minutes of life. Proves L3."""
    await harness.submit(runner="process", spec={"command": ["sleep", "1"]})
    (lease,) = await harness.claim_process()
    await harness.store.leases.start([lease])
    for _ in range(7):
        await harness.store.leases.hand_over([lease])
        (lease,) = await harness.adopt()
        assert lease.adoption.adoptions == 1
    await harness.store.leases.hand_over([lease], adoption_failed=True)
    (lease,) = await harness.adopt()
    assert lease.adoption.adoptions == 2
    for _ in range(11):
        await harness.advance(59)
        await harness.store.leases.beat("w2", [lease], ttl=TTL)
    await harness.store.leases.hand_over([lease], adoption_failed=True)
    (lease,) = await harness.adopt()
    assert lease.adoption.adoptions == 1
