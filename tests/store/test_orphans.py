"""Attempts whose worker is gone: handed over, given back, settled as lost, paused for a person, taken back."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from holdfast.duties import orphan_settler, remover
from holdfast.errors import Conflict, NotFound
from holdfast.model import Beat, Cause, Claimable, Gate, LaneState, Lease, Outcome, Status, StopKind
from holdfast.store import Store, notify, open_store
from tests.conftest import assert_healthy
from tests.support.store_harness import TTL, StoreHarness

PROCESS = {"runner": "process", "spec": {"command": ["true"]}}
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


async def told(harness: StoreHarness, lease: Lease, type: str) -> list[Any]:
    return [event.data for event in await harness.events(lease) if event.type == type]


# Handing over and giving back


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
    assert (await told(harness, mine[0], "lease"))[0] == {
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


async def test_lease_that_its_worker_never_heard_of_is_given_back(harness: StoreHarness) -> None:
    """Proves L7, L13."""
    function, laned = await harness.submit(), await harness.submit(lane="L")
    behind = await harness.submit(lane="L")
    process = await harness.submit(**PROCESS)
    await harness.claim()
    await harness.claim_process()
    beats = await unknown(harness)
    assert await harness.store.leases.give_back("w1", beats) == {function.id, laned.id, process.id}
    assert await harness.store.leases.give_back("w1", beats) == frozenset()
    for job in (function, laned):
        record = await harness.get(job)
        assert (record.status, record.gate, record.attempts) == (Status.QUEUED, Gate.OPEN, 0)
        (attempt,) = await harness.store.attempts.list(job.id)
        assert attempt.cause is Cause.DRAINED
    record = await harness.get(process)
    assert (record.status, record.lease, record.orphaned_at) == (Status.RUNNING, None, harness.clock.now())
    assert {lease.id for lease in await harness.claim()} == {function.id, laned.id}
    assert await harness.status(behind) is Status.QUEUED
    assert [lease.id for lease in await harness.adopt()] == [process.id]


async def test_give_back_is_fenced_and_respects_a_stop_request(harness: StoreHarness) -> None:
    """Proves C1, L4."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    beats = await unknown(harness)
    assert await harness.store.leases.give_back("w2", beats) == frozenset()
    stale = [Beat(id=lease.id, token=lease.token - 1, answer="unknown")]
    known = [Beat(id=lease.id, token=lease.token, answer="yours")]
    assert await harness.store.leases.give_back("w1", [*stale, *known]) == frozenset()
    await harness.store.jobs.cancel(job.id)
    assert await harness.store.leases.give_back("w1", beats) == {job.id}
    assert await harness.status(job) is Status.CANCELLED


async def test_function_that_was_adopted_is_never_given_back_as_if_it_had_not_run(harness: StoreHarness) -> None:
    """Proves L13."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    await harness.store.leases.hand_over([lease])
    await harness.adopt(worker="w2")
    assert await harness.store.leases.give_back("w2", await unknown(harness, "w2")) == {job.id}
    record = await harness.get(job)
    assert (record.status, record.attempts, record.lease) == (Status.RUNNING, 1, None)


# Nobody reaches it


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
    """Proves R21, R6. No person is asked where time answers, and those behind it are settled meanwhile."""
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


# Somebody reaches it again


@pytest.mark.parametrize("lane", [None, "L"])
async def test_worker_away_for_longer_than_the_grace_adopts_its_healthy_child(
    harness: StoreHarness, lane: str | None
) -> None:
    """Proves R6."""
    lease = await stranded(harness, lane=lane)
    behind = await harness.submit(**PROCESS, lane=lane) if lane else None
    await register(harness, "w2")
    assert await harness.adopt(worker="w2") == []
    async with harness.store.notifications.listening() as signal:
        assert await harness.store.leases.recover(["host-b"]) == frozenset()
        assert await signal.wait(0) == set()
        assert await harness.store.leases.recover(["host-b", "host-a"]) == {lease.id}
        assert notify.ORPHAN in await signal.wait(1)
    assert await harness.store.leases.recover(["host-a"]) == frozenset()
    job = await harness.get(lease)
    assert (job.status, job.error, job.orphaned_at) == (Status.RUNNING, None, harness.clock.now())
    assert (await told(harness, lease, "status"))[-1] == {"status": "running", "attempt": 1, "by": "adopt"}
    (adopted,) = await harness.adopt(worker="w2")
    assert (adopted.id, adopted.attempt, adopted.adoption.phase) == (lease.id, 1, "started")
    if behind is not None:
        assert (await harness.store.lanes.get("L")).head == lease.id
        assert await harness.claim_process(worker="w2") == []
    assert await harness.finish(adopted) is Status.SUCCEEDED
    assert (await harness.get(lease)).attempts == 1
    if behind is not None:
        assert [next_.id for next_ in await harness.claim_process(worker="w2")] == [behind.id]


async def test_one_pass_of_recovery_is_bounded(harness: StoreHarness) -> None:
    """Proves R6."""
    await register(harness)
    for _ in range(3):
        await harness.submit(**PROCESS)
    await harness.claim_process()
    await harness.store.leases.orphan("w1")
    await harness.advance(GRACE + 1)
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 3
    assert [len(await harness.store.leases.recover(["host-a"], limit=2)) for _ in range(3)] == [2, 1, 0]


async def test_stop_request_from_before_goes_to_whoever_adopts(harness: StoreHarness) -> None:
    """Proves C1, R6."""
    lease = await lost_host(harness)
    await harness.store.jobs.cancel(lease.id)
    await orphan_settler.run_once(harness.store, grace=GRACE)
    assert await harness.store.leases.recover(["host-a"]) == {lease.id}
    (adopted,) = await harness.adopt(worker="w2")
    assert adopted.adoption.stop_request is not None
    assert adopted.adoption.stop_request.kind is StopKind.CANCEL


@pytest.mark.parametrize("verb", ["cancel", "resolve", "resume"])
async def test_what_a_person_decided_meanwhile_wins_over_recovery(harness: StoreHarness, verb: str) -> None:
    """Proves R6, C8."""
    lease = await stranded(harness)
    jobs = harness.store.jobs
    if verb == "cancel":
        await jobs.cancel(lease.id)
    elif verb == "resolve":
        await jobs.resolve(lease.id, "by hand")
    else:
        await jobs.resume(lease.id, stopped=True)
    before = await harness.get(lease)
    assert await harness.store.leases.recover(["host-a"]) == frozenset()
    assert await harness.get(lease) == before
    assert [attempt.cause for attempt in await harness.store.attempts.list(lease.id)] == [Cause.LOST]


async def test_job_that_is_held_or_worn_out_is_not_recovered(harness: StoreHarness) -> None:
    """Proves R6, L3."""
    held = await lost_host(harness, stop_after=10, on_lost="hold")
    await orphan_settler.run_once(harness.store, grace=GRACE)
    await harness.submit(**PROCESS)
    await harness.claim_process()
    for n in range(1, 7):
        await harness.store.leases.orphan(f"w{n}")
        await harness.advance(400)
        await harness.adopt(worker=f"w{n + 1}")
    await harness.store.leases.orphan("w7")
    assert await harness.store.leases.abandon() == 1
    assert await harness.store.leases.recover(["host-a"]) == frozenset()
    assert await harness.status(held) is Status.PAUSED


async def test_resume_needs_a_persons_word_only_while_nobody_reaches_the_attempt(harness: StoreHarness) -> None:
    """Proves R6."""
    lease = await stranded(harness)
    with pytest.raises(Conflict, match=r"may still run in host-a; make sure .* stopped=true"):
        await harness.store.jobs.resume(lease.id)
    await register(harness, "w2")
    with pytest.raises(Conflict, match=r"worker w2 is there and will adopt it"):
        await harness.store.jobs.resume(lease.id)
    assert await harness.status(lease) is Status.PAUSED
    assert (await harness.store.jobs.resume(lease.id, stopped=True)).status is Status.QUEUED
    (again,) = await harness.claim_process(worker="w2")
    assert (again.attempt, again.spent) == (2, 1)
    assert await harness.finish(again, Outcome.succeeded()) is Status.SUCCEEDED


async def test_who_cancels_a_lost_job_has_not_said_that_it_stopped(harness: StoreHarness) -> None:
    """Proves R6, C8. Its attempt may still run on a host that is cut off, so another one wants a person's word."""
    lease = await stranded(harness)
    await harness.store.jobs.cancel(lease.id)
    with pytest.raises(Conflict, match=r"attempt 1 may still run in host-a; make sure .* stopped=true"):
        await harness.store.jobs.resume(lease.id)
    assert await harness.status(lease) is Status.CANCELLED
    await harness.store.jobs.resume(lease.id, stopped=True)
    (again,) = await harness.claim_process(worker="w2", domain="host-b")
    assert again.attempt == 2
    await harness.fail(again)
    assert (await harness.store.jobs.resume(lease.id)).status is Status.QUEUED


async def test_who_interrupts_a_lost_job_is_remembered_until_somebody_adopts_it(harness: StoreHarness) -> None:
    """Proves C1, R6. It is paused already, but it would go on when its host comes back."""
    lease = await stranded(harness)
    stopped = await harness.store.jobs.interrupt(lease.id)
    assert (stopped.outcome, stopped.job.status) == ("already", Status.PAUSED)
    await harness.store.jobs.interrupt(lease.id)
    assert await told(harness, lease, "cancel") == [{"cancel": "requested", "kind": "interrupt"}]
    await register(harness, "w2")
    assert await harness.store.leases.recover(["host-a"]) == {lease.id}
    (adopted,) = await harness.adopt(worker="w2")
    assert adopted.adoption is not None
    assert adopted.adoption.stop_request is not None
    assert adopted.adoption.stop_request.kind is StopKind.INTERRUPT


async def test_who_resumes_a_lost_job_takes_the_interrupt_back(harness: StoreHarness) -> None:
    """Proves C1."""
    lease = await stranded(harness)
    await harness.store.jobs.interrupt(lease.id)
    await harness.store.jobs.resume(lease.id, stopped=True)
    (again,) = await harness.claim_process(worker="w2", domain="host-b")
    assert await harness.store.leases.stops("w2") == {}
    assert await harness.finish(again, Outcome.requeued(Cause.DRAINED)) is Status.QUEUED


# A person says that it is gone


@pytest.mark.parametrize("name", ["a", "host-a"])
async def test_host_that_a_person_calls_gone_is_settled_as_lost(harness: StoreHarness, name: str) -> None:
    """Proves R6, L11."""
    leased = await started(harness, max_attempts=2)
    await harness.submit(**PROCESS, on_lost="fail", lane="L")
    (failing,) = await harness.claim_process()
    elsewhere = await harness.submit(**PROCESS)
    (other,) = await harness.claim_process(worker="w2", domain="host-b")
    await harness.advance(TTL + 1)
    lost = await harness.store.workers.lost(name, by="ann")
    assert (lost.workers, set(lost.jobs)) == (("w1",), {leased.id, failing.id})
    assert [await harness.status(lease) for lease in (leased, failing)] == [Status.QUEUED, Status.FAILED]
    for lease in (leased, failing):
        (attempt,) = await harness.store.attempts.list(lease.id)
        assert attempt.cause is Cause.LOST
        assert await told(harness, lease, "audit") == [{"action": "lost", "host": name, "by": "ann"}]
        assert await harness.finish(lease) is None
    assert (await harness.store.lanes.get("L")).blockers == (failing.id,)
    assert await harness.store.workers.list() == []
    assert (await harness.get(elsewhere)).lease is not None
    assert await harness.finish(other) is Status.SUCCEEDED
    with pytest.raises(NotFound, match="no host or domain"):
        await harness.store.workers.lost(name)


@pytest.mark.parametrize(
    ("rules", "status"),
    [
        ({"max_attempts": 2}, Status.QUEUED),
        ({}, Status.FAILED),
        ({"on_lost": "hold"}, Status.PAUSED),
    ],
)
@pytest.mark.parametrize("lane", [None, "L"])
async def test_job_that_was_paused_as_lost_is_settled_with_its_host(
    harness: StoreHarness, rules: dict[str, Any], status: Status, lane: str | None
) -> None:
    """Proves R6, L11."""
    lease = await stranded(harness, lane=lane, **rules)
    behind = await harness.submit(**PROCESS, lane=lane) if lane else None
    dependant = await harness.submit(needs=[lease.id])
    lost = await harness.store.workers.lost("a")
    assert (lost.workers, lost.jobs) == (("w1",), (lease.id,))
    job = await harness.get(lease)
    assert (job.status, job.attempts, job.error and job.error.code) == (status, 1, "lost")
    assert await told(harness, lease, "audit") == [{"action": "lost", "host": "a"}]
    assert await harness.status(dependant) is (Status.FAILED if status is Status.FAILED else Status.QUEUED)
    assert await harness.store.leases.recover(["host-a"]) == frozenset()
    if behind is not None:
        expected = LaneState.ACTIVE if status is Status.QUEUED else LaneState.BLOCKED
        assert (await harness.store.lanes.get("L")).state is expected
    if status is not Status.QUEUED:
        assert await harness.claim_process(worker="w2") == []
    else:  # A first loss waits for nothing.
        (again,) = await harness.claim_process(worker="w2")
        assert (again.id, again.attempt) == (lease.id, 2)
    if status is Status.PAUSED:
        assert (await harness.store.jobs.resume(lease.id)).status is Status.QUEUED


async def test_host_with_a_live_worker_is_not_gone(harness: StoreHarness) -> None:
    """Proves R6."""
    lease = await started(harness)
    await harness.advance(TTL + 1)
    await register(harness, "w2")
    for name in ("a", "host-a"):
        with pytest.raises(Conflict, match="worker w2 is alive"):
            await harness.store.workers.lost(name)
    assert (await harness.get(lease)).lease is not None
    with pytest.raises(NotFound):
        await harness.store.workers.lost("nowhere")
    with pytest.raises(NotFound):
        await harness.store.workers.lost("function")


async def test_rebooted_host_gives_up_what_ran_before_the_boot(harness: StoreHarness) -> None:
    """Proves R6."""
    lease = await started(harness, max_attempts=2)
    await harness.advance(TTL + 1)
    await register(harness, "w2", domains=["host-a:second-boot"])
    with pytest.raises(Conflict):
        await harness.store.workers.lost("a")
    assert (await harness.store.workers.lost("host-a")).jobs == (lease.id,)
    assert [worker.worker for worker in await harness.store.workers.list()] == ["w2"]


async def test_domain_that_another_host_reaches_is_left_to_it(harness: StoreHarness) -> None:
    """Proves R6."""
    await register(harness, "w1", domains=["host-a", "docker-x", "function"])
    await register(harness, "w2", host="b", domains=["host-b", "docker-x", "function"])
    await harness.submit()
    (function,) = await harness.claim()
    for _ in range(2):
        await harness.submit(**PROCESS)
    (local,) = await harness.claim_process(slots=1)
    (shared,) = await harness.claim_process(domain="docker-x")
    await harness.advance(TTL + 1)
    await harness.store.leases.beat("w2", [], ttl=TTL)
    assert (await harness.store.workers.lost("a")).jobs == (local.id,)
    adopted = await harness.adopt(worker="w2", domains=["host-b", "docker-x", "function"])
    assert {lease.id for lease in adopted} == {function.id, shared.id}


async def test_host_is_settled_in_batches(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves R6."""
    monkeypatch.setattr("holdfast.store.workers.BATCH", 2)
    await register(harness)
    jobs = [await harness.submit(**PROCESS) for _ in range(5)]
    await harness.claim_process()
    await harness.advance(TTL + 1)
    assert (await harness.store.workers.lost("a")).jobs == tuple(sorted(job.id for job in jobs))


async def test_rows_of_dead_workers_go_after_a_week_when_nothing_waits_in_their_domains(harness: StoreHarness) -> None:
    """Proves L14, R6."""

    async def known() -> list[str]:
        return [worker.worker for worker in await harness.store.workers.list()]

    lease = await started(harness)
    await register(harness, "w2", host="b", domains=["host-b", "function"])
    await harness.advance(remover.DEAD_SECONDS)
    await remover.run_once(harness.store)
    assert await known() == ["w1", "w2"]
    await harness.advance(TTL + 1)
    assert await remover.run_once(harness.store) == 1
    assert await known() == ["w1"]  # Its lease was never cleared.
    await harness.store.leases.reap()
    await remover.run_once(harness.store)
    assert await known() == ["w1"]
    await harness.advance(GRACE + 1)
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 1
    await remover.run_once(harness.store)
    assert await known() == ["w1"]
    await harness.store.jobs.resume(lease.id, stopped=True)
    assert await remover.run_once(harness.store) == 1
    assert await known() == []


async def test_losing_and_regaining_sight_races_with_everything_else_without_a_deadlock(clean_url: str) -> None:
    """Proves L20, N1."""
    pair = [Claimable(queue="default", capability="process", domain="host-a")]
    rounds, ended = 60, 0

    async def submit(store: Store, n: int) -> None:
        await store.jobs.submit_many([{**PROCESS, "lane": lane} for lane in ("L", "M", None)])

    async def work(store: Store, n: int) -> None:
        nonlocal ended
        given = await store.leases.claim(f"w{n}", pair, slots=3, ttl=60, domains=["host-a"] if n % 2 else ())
        if n % 3 == 0:
            ends = [(lease, Outcome.succeeded()) for lease in (*given.adopted, *given.claimed)]
            ended += sum(status is not None for status in (await store.leases.finish(ends)).values())
        else:
            await store.leases.orphan(f"w{n}")

    async def lose_sight(store: Store, n: int) -> None:
        await orphan_settler.run_once(store, grace=0.0)

    async def regain(store: Store, n: int) -> None:
        await store.leases.recover(["host-a"])

    async def give_up(store: Store, n: int) -> None:
        if n % 10 == 0:
            with contextlib.suppress(NotFound):
                await store.workers.lost("host-a")

    async def decide(store: Store, n: int) -> None:
        for job in (await store.jobs.list(status=[Status.PAUSED, Status.FAILED], limit=5)).items:
            with contextlib.suppress(Conflict):
                if n % 2:
                    await store.jobs.resume(job.id, stopped=True)
                else:
                    await store.jobs.cancel(job.id)

    async def again(store: Store, verb: Callable[[Store, int], Awaitable[None]]) -> None:
        for n in range(rounds):
            await verb(store, n)

    async with await open_store(clean_url, listen=False, connections=8) as store:
        async with asyncio.TaskGroup() as group:
            for verb in (submit, work, work, lose_sight, regain, regain, give_up, decide):
                group.create_task(again(store, verb))
        await assert_healthy(store)
        running = [job.lane for job in (await store.jobs.list(status=[Status.RUNNING], limit=1000)).items if job.lane]
        assert len(running) == len(set(running))
        for job in (await store.jobs.list(limit=1000)).items:
            events = (await store.events.page(job.id)).items
            assert [event.seq for event in events] == list(range(1, job.last_seq + 1))
            assert [event.data["status"] for event in events if event.type == "status"][-1] == job.status
    assert ended
