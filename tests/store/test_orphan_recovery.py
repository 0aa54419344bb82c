"""Orphans that a worker reaches again, and hosts that a person declares gone."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.duties import orphan_settler, worker_pruner
from holdfast.errors import Conflict, NotFound
from holdfast.model import Cause, Claimable, LaneState, Outcome, Status, StopKind
from holdfast.store import Store, notify, open_store
from tests.conftest import assert_healthy
from tests.store.test_orphans import GRACE, events_of, lost_host, register, started, stranded
from tests.support.job_states import PROCESS
from tests.support.store_harness import TTL, StoreHarness


@pytest.mark.parametrize("lane", [None, "L"])
async def test_worker_away_for_longer_than_the_grace_adopts_its_healthy_child(
    harness: StoreHarness, lane: str | None
) -> None:
    """Proves R6."""
    lease = await stranded(harness, lane=lane)
    later = await harness.submit(**PROCESS, lane=lane) if lane else None
    await register(harness, "w2")
    assert await harness.adopt(worker="w2") == []
    async with harness.store.notifications.listening() as signal:
        assert await harness.store.leases.recover(["host-b"]) == frozenset()
        assert notify.ORPHAN not in await signal.wait(0)
        assert await harness.store.leases.recover(["host-b", "host-a"]) == {lease.id}
        assert notify.ORPHAN in await signal.wait(1)
    assert await harness.store.leases.recover(["host-a"]) == frozenset()
    job = await harness.get(lease)
    assert (job.status, job.error, job.orphaned_at) == (Status.RUNNING, None, harness.clock.now())
    assert (await events_of(harness, lease, "status"))[-1] == {"status": "running", "attempt": 1, "by": "adopt"}
    (adopted,) = await harness.adopt(worker="w2")
    assert (adopted.id, adopted.attempt, adopted.adoption.phase) == (lease.id, 1, "started")
    if later is not None:
        assert (await harness.store.lanes.get("L")).head == lease.id
        assert await harness.claim_process(worker="w2") == []
    assert await harness.finish(adopted) is Status.SUCCEEDED
    assert (await harness.get(lease)).attempts == 1
    if later is not None:
        assert [next_.id for next_ in await harness.claim_process(worker="w2")] == [later.id]


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


async def test_earlier_stop_request_reaches_the_adopter(harness: StoreHarness) -> None:
    """Proves C1, R6."""
    lease = await lost_host(harness)
    await harness.store.jobs.cancel(lease.id)
    await orphan_settler.run_once(harness.store, grace=GRACE)
    assert await harness.store.leases.recover(["host-a"]) == {lease.id}
    (adopted,) = await harness.adopt(worker="w2")
    assert adopted.adoption.stop_request is not None
    assert adopted.adoption.stop_request.kind is StopKind.CANCEL


@pytest.mark.parametrize("verb", ["cancel", "resolve", "resume"])
async def test_decision_of_a_person_wins_over_recovery(harness: StoreHarness, verb: str) -> None:
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
    held = await lost_host(harness, stop_after=10, on_lost="pause")
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


async def test_resume_needs_confirmation_only_while_the_attempt_is_out_of_reach(harness: StoreHarness) -> None:
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


async def test_cancel_of_a_lost_job_does_not_confirm_that_it_stopped(harness: StoreHarness) -> None:
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


async def test_interrupt_of_a_lost_job_is_kept_for_its_adopter(harness: StoreHarness) -> None:
    """Proves C1, R6. It is paused already, but it would go on when its host comes back."""
    lease = await stranded(harness)
    stopped = await harness.store.jobs.interrupt(lease.id)
    assert (stopped.outcome, stopped.job.status) == ("already", Status.PAUSED)
    await harness.store.jobs.interrupt(lease.id)
    assert await events_of(harness, lease, "cancel") == [{"cancel": "requested", "kind": "interrupt"}]
    await register(harness, "w2")
    assert await harness.store.leases.recover(["host-a"]) == {lease.id}
    (adopted,) = await harness.adopt(worker="w2")
    assert adopted.adoption is not None
    assert adopted.adoption.stop_request is not None
    assert adopted.adoption.stop_request.kind is StopKind.INTERRUPT


async def test_resume_of_a_lost_job_clears_its_interrupt(harness: StoreHarness) -> None:
    """Proves C1."""
    lease = await stranded(harness)
    await harness.store.jobs.interrupt(lease.id)
    await harness.store.jobs.resume(lease.id, stopped=True)
    (again,) = await harness.claim_process(worker="w2", domain="host-b")
    assert await harness.store.leases.stop_requests("w2") == {}
    assert await harness.finish(again, Outcome.requeued(Cause.DRAINED)) is Status.QUEUED


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
        assert await events_of(harness, lease, "audit") == [{"action": "lost", "host": name, "by": "ann"}]
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
        ({"on_lost": "pause"}, Status.PAUSED),
        ({"on_lost": "hold"}, Status.PAUSED),
    ],
)
@pytest.mark.parametrize("lane", [None, "L"])
async def test_job_that_was_paused_as_lost_is_settled_with_its_host(
    harness: StoreHarness, rules: dict[str, Any], status: Status, lane: str | None
) -> None:
    """Proves R6, L11."""
    lease = await stranded(harness, lane=lane, **rules)
    later = await harness.submit(**PROCESS, lane=lane) if lane else None
    dependant = await harness.submit(needs=[lease.id])
    lost = await harness.store.workers.lost("a")
    assert (lost.workers, lost.jobs) == (("w1",), (lease.id,))
    job = await harness.get(lease)
    assert (job.status, job.attempts, job.error and job.error.code) == (status, 1, "lost")
    assert await events_of(harness, lease, "audit") == [{"action": "lost", "host": "a"}]
    assert await harness.status(dependant) is (Status.FAILED if status is Status.FAILED else Status.QUEUED)
    assert await harness.store.leases.recover(["host-a"]) == frozenset()
    if later is not None:
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


async def test_attempts_from_before_a_reboot_are_lost(harness: StoreHarness) -> None:
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
    await harness.advance(worker_pruner.DEAD_SECONDS)
    await worker_pruner.run_once(harness.store)
    assert await known() == ["w1", "w2"]
    await harness.advance(TTL + 1)
    assert await worker_pruner.run_once(harness.store) == 1
    assert await known() == ["w1"]  # Its lease was never cleared.
    await harness.store.leases.reap()
    await worker_pruner.run_once(harness.store)
    assert await known() == ["w1"]
    await harness.advance(GRACE + 1)
    assert await orphan_settler.run_once(harness.store, grace=GRACE) == 1
    await worker_pruner.run_once(harness.store)
    assert await known() == ["w1"]
    await harness.store.jobs.resume(lease.id, stopped=True)
    assert await worker_pruner.run_once(harness.store) == 1
    assert await known() == []


async def test_losing_and_regaining_domains_does_not_deadlock_with_other_operations(clean_url: str) -> None:
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
