"""Orphans: handed over, released, settled as lost, paused for a person."""

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.duties import orphan_settler
from holdfast.model import Beat, Cause, Gate, LaneState, Lease, Status
from holdfast.store import notify
from tests.support.job_states import PROCESS
from tests.support.store_harness import TTL, StoreHarness

GRACE = 300.0


async def register(
    harness: StoreHarness, worker: str = "w1", *, host: str = "a", domains: Sequence[str] = ("host-a",)
) -> None:
    fields = {"queues": {"default": 4}, "capabilities": ["process"], "domains": domains, "ttl": TTL}
    await harness.store.workers.register(worker, host=host, pid=7, **fields)  # type: ignore[arg-type]


async def started(harness: StoreHarness, **fields: Any) -> Lease:
    """A process job that runs at a registered worker."""
    await register(harness)
    await harness.submit(**{**PROCESS, **fields})
    (lease,) = await harness.claim_process(slots=1)
    await harness.store.leases.start([lease])
    return lease


async def lost_host(harness: StoreHarness, **fields: Any) -> Lease:
    """A process job whose only worker died longer ago than the grace."""
    lease = await started(harness, **fields)
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    await harness.advance(GRACE + 1)
    return lease


async def stranded(harness: StoreHarness, **fields: Any) -> Lease:
    """A process job that is paused because nobody knows whether it still runs."""
    lease = await lost_host(harness, **fields)
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 1
    assert await harness.status(lease) is Status.PAUSED
    return lease


async def events_of(harness: StoreHarness, lease: Lease, type: str) -> list[Any]:
    return [event.data for event in await harness.events(lease) if event.type == type]


# Handed over and released


async def test_all_leases_of_a_dead_worker_are_handed_over_at_once(harness: StoreHarness) -> None:
    """Proves L19, L4."""
    await register(harness)
    for _ in range(3):
        await harness.submit(**PROCESS)
    mine = await harness.claim_process(slots=2)
    (other,) = await harness.claim_process(worker="w2")
    async with harness.store.notifications.listening() as signal:
        assert await harness.store.leases.orphan("w1") == {lease.id for lease in mine}
        assert notify.ORPHAN in await signal.wait(1)
    assert await harness.store.workers.list() == []
    assert [await harness.finish(lease) for lease in mine] == [None, None]
    adopted = await harness.adopt(worker="w3")
    assert {(lease.id, lease.token) for lease in adopted} == {(lease.id, lease.token + 2) for lease in mine}
    assert (await events_of(harness, mine[0], "lease"))[0] == {
        "lease": "handed_over",
        "worker": "w1",
        "token": 2,
        "reason": "dead",
    }
    assert await harness.finish(other) is Status.SUCCEEDED
    assert await harness.store.leases.orphan("w1") == frozenset()


async def test_orphan_that_wears_out_its_adopters_waits_longer_each_time(harness: StoreHarness) -> None:
    """Proves L3, L19."""
    await harness.submit(**PROCESS)
    await harness.claim_process()
    waits = []
    for n in range(1, 4):
        await harness.store.leases.orphan(f"w{n}")
        wait = 0.0
        while not await harness.adopt(worker=f"w{n + 1}"):
            await harness.advance(1)
            wait += 1
        waits.append(wait)
    assert waits == [0, 5, 10]


async def unknown(harness: StoreHarness, worker: str = "w1") -> Sequence[Beat]:
    pulse = await harness.store.leases.beat(worker, [], ttl=TTL)
    assert {beat.answer for beat in pulse.jobs} == {"unknown"}
    return pulse.jobs


async def test_lease_whose_claim_reply_was_lost_is_released(harness: StoreHarness) -> None:
    """Proves L7, L13."""
    function, laned = await harness.submit(), await harness.submit(lane="L")
    later = await harness.submit(lane="L")
    process = await harness.submit(**PROCESS)
    await harness.claim()
    await harness.claim_process()
    beats = await unknown(harness)
    assert await harness.store.leases.release_unknown("w1", beats) == {function.id, laned.id, process.id}
    assert await harness.store.leases.release_unknown("w1", beats) == frozenset()
    for job in (function, laned):
        record = await harness.get(job)
        assert (record.status, record.gate, record.attempts) == (Status.QUEUED, Gate.OPEN, 0)
        (attempt,) = await harness.store.attempts.list(job.id)
        assert attempt.cause is Cause.DRAINED
    record = await harness.get(process)
    assert (record.status, record.lease, record.orphaned_at) == (Status.RUNNING, None, harness.clock.now())
    assert {lease.id for lease in await harness.claim()} == {function.id, laned.id}
    assert await harness.status(later) is Status.QUEUED
    assert [lease.id for lease in await harness.adopt()] == [process.id]


async def test_release_of_a_lost_claim_is_fenced_and_respects_a_stop_request(harness: StoreHarness) -> None:
    """Proves C1, L4."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    beats = await unknown(harness)
    assert await harness.store.leases.release_unknown("w2", beats) == frozenset()
    stale = [Beat(id=lease.id, token=lease.token - 1, answer="unknown")]
    known = [Beat(id=lease.id, token=lease.token, answer="yours")]
    assert await harness.store.leases.release_unknown("w1", [*stale, *known]) == frozenset()
    await harness.store.jobs.cancel(job.id)
    assert await harness.store.leases.release_unknown("w1", beats) == {job.id}
    assert await harness.status(job) is Status.CANCELLED


async def test_adopted_function_is_not_requeued_as_not_started(harness: StoreHarness) -> None:
    """Proves L13."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    await harness.store.leases.hand_over([lease])
    await harness.adopt(worker="w2")
    assert await harness.store.leases.release_unknown("w2", await unknown(harness, "w2")) == {job.id}
    record = await harness.get(job)
    assert (record.status, record.attempts, record.lease) == (Status.RUNNING, 1, None)


# Out of reach


async def test_orphan_waits_for_its_grace_while_no_live_worker_has_its_domain(harness: StoreHarness) -> None:
    """Proves R6."""
    lease = await started(harness)
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    await harness.advance(GRACE - 1)
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 0
    await harness.advance(2)
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 1
    job = await harness.get(lease)
    assert (job.status, job.attempts, job.lease, job.finished_at) == (Status.PAUSED, 1, None, None)
    assert job.error is not None
    assert job.error.code == "lost"
    assert all(word in job.error.message for word in ("host-a", "stopped=true", "workers lost host-a"))
    (attempt,) = await harness.store.attempts.list(lease.id)
    assert (attempt.ended_at, attempt.phase, attempt.domain) == (None, "started", "host-a")
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 0
    assert await harness.finish(lease) is None


async def test_grace_begins_when_the_last_worker_of_the_domain_was_gone(harness: StoreHarness) -> None:
    """Proves R6."""
    lease = await started(harness)
    await harness.store.leases.orphan("w1")
    await register(harness, "w2")
    for _ in range(20):  # It lives, and adopts nothing: its engine is away.
        await harness.advance(TTL / 3)
        await harness.store.leases.beat("w2", [], ttl=TTL)
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 0
    await harness.advance(TTL + GRACE - 1)
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 0
    await harness.advance(2)
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 1
    assert await harness.status(lease) is Status.PAUSED


async def test_worker_of_another_domain_does_not_keep_an_orphan_waiting(harness: StoreHarness) -> None:
    """Proves R6."""
    lease = await lost_host(harness)
    await register(harness, "w2", host="b", domains=["host-b"])
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 1
    assert await harness.status(lease) is Status.PAUSED


async def test_orphaned_function_waits_for_any_worker(harness: StoreHarness) -> None:
    """Proves R6."""
    await harness.submit()
    (lease,) = await harness.claim()
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    await harness.advance(100 * GRACE)
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 0
    assert [adopted.id for adopted in await harness.adopt(worker="w9")] == [lease.id]


@pytest.mark.parametrize(
    ("rules", "status"),
    [
        ({"max_attempts": 2}, Status.QUEUED),
        ({"max_attempts": 1}, Status.FAILED),
        ({"max_attempts": 2, "on_lost": "fail"}, Status.FAILED),
        ({"max_attempts": 2, "on_lost": "pause"}, Status.PAUSED),
        ({"max_attempts": 2, "on_lost": "hold"}, Status.PAUSED),
    ],
)
@pytest.mark.parametrize("lane", [None, "L"])
async def test_orphan_that_must_have_stopped_ends_as_its_policy_says(
    harness: StoreHarness, rules: dict[str, Any], status: Status, lane: str | None
) -> None:
    """Proves R6, R21, L11."""
    lease = await lost_host(harness, stop_after=100, stop_grace=5, lane=lane, **rules)
    dependant = await harness.submit(needs=[lease.id])
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 1
    job = await harness.get(lease)
    assert (job.status, job.attempts, job.error and job.error.code) == (status, 1, "lost")
    (attempt,) = await harness.store.attempts.list(lease.id)
    assert (attempt.cause, attempt.ended_at) == (Cause.LOST, harness.clock.now())
    assert await harness.status(dependant) is (Status.FAILED if status is Status.FAILED else Status.QUEUED)
    if lane is not None:
        state = (await harness.store.lanes.get(lane)).state
        assert state is (LaneState.ACTIVE if status is Status.QUEUED else LaneState.BLOCKED)
    if status is Status.QUEUED:
        assert job.available_at == harness.clock.now()  # a first loss waits for nothing
        await harness.advance(6)
        await harness.store.gates.promote()
        (again,) = await harness.claim_process()
        assert (again.id, again.attempt) == (lease.id, 2)
    elif status is Status.PAUSED:
        assert (await harness.store.jobs.resume(lease.id)).status is Status.QUEUED


async def test_stop_after_counts_from_the_last_heartbeat_with_grace_and_margin(harness: StoreHarness) -> None:
    """Proves R21."""
    lease = await started(harness, stop_after=1000, stop_grace=5, max_attempts=2)
    await harness.advance(TTL / 2)
    await harness.store.leases.beat("w1", [lease], ttl=TTL)
    await harness.store.leases.orphan("w1")
    await harness.advance(1000 + 5 + orphan_settler.MARGIN)
    (orphan,) = await harness.store.leases.unreachable(GRACE)
    assert not orphan_settler.must_have_stopped(orphan)
    await harness.advance(1)
    (orphan,) = await harness.store.leases.unreachable(GRACE)
    assert orphan_settler.must_have_stopped(orphan)


async def test_orphan_whose_stop_after_is_longer_than_the_grace_waits_for_it(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R21, R6. It is not paused for a person, and later orphans are settled meanwhile."""
    monkeypatch.setattr(orphan_settler, "BATCH", 1)
    await register(harness)
    waits = await started(harness, stop_after=10 * GRACE, max_attempts=2)
    other = await started(harness)
    await harness.store.leases.orphan("w1")
    await harness.advance(GRACE + TTL + 1)
    assert [await orphan_settler.run_once(harness.store, grace=GRACE) for _ in range(2)] == [1, 0]
    assert (await harness.status(waits), await harness.status(other)) == (Status.RUNNING, Status.PAUSED)
    await harness.advance(10 * GRACE)
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 1
    assert await harness.status(waits) is Status.QUEUED


async def test_cancelled_orphan_that_must_have_stopped_is_not_run_again(harness: StoreHarness) -> None:
    """Proves C1."""
    lease = await lost_host(harness, stop_after=10, max_attempts=3)
    await harness.store.jobs.cancel(lease.id)
    await orphan_settler.run_once(harness.store, grace=GRACE)
    assert await harness.status(lease) is Status.CANCELLED


async def test_orphan_that_is_adopted_meanwhile_is_left_alone(harness: StoreHarness) -> None:
    """Proves L4, R6."""
    await lost_host(harness, stop_after=10, max_attempts=2)
    (orphan,) = await harness.store.leases.unreachable(GRACE)
    (lease,) = await harness.adopt(worker="w2")
    assert await harness.store.leases.lose(orphan) is None
    assert not await harness.store.leases.strand(orphan)
    assert await harness.finish(lease) is Status.SUCCEEDED
    await harness.store.jobs.delete(lease.id)
    assert await harness.store.leases.lose(orphan) is None
    assert not await harness.store.leases.strand(orphan)


async def test_one_pass_is_bounded(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves R6."""
    monkeypatch.setattr(orphan_settler, "BATCH", 2)
    await register(harness)
    for _ in range(3):
        await harness.submit(**PROCESS)
    await harness.claim_process()
    await harness.store.leases.orphan("w1")
    await harness.advance(GRACE + 1)
    assert [await orphan_settler.run_once(harness.store, grace=GRACE) for _ in range(3)] == [2, 1, 0]
