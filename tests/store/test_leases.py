"""What workers do: claim, adopt, start, beat, finish, requeue, hand over; and the reaper."""

from typing import Any

import pytest

from holdfast.duties.reaper import Reaper
from holdfast.errors import Invalid, NotFound, StoreUnreachable, TooLarge
from holdfast.model import Cause, Claimable, Error, Lease, Outcome, Phase, Status, StopKind, StopPhase, new_worker_id
from holdfast.store.store import Store, connect
from holdfast.timing import ManualClock, backoff
from tests.support.store_harness import START, TTL, StoreHarness

RETRY = Outcome.requeued(Cause.EXIT, error=Error(code="exit_nonzero", message="boom"))
PROCESS = {"runner": "process", "spec": {"command": ["true"]}}


async def orphan(harness: StoreHarness, **fields: object) -> Lease:
    """A process job whose worker died after the start."""
    await harness.submit(**{**PROCESS, **fields})
    (lease,) = await harness.claim_process()
    await harness.store.leases.start([lease])
    await harness.advance(TTL + 1)
    assert len(await harness.store.leases.reap()) == 1
    return lease


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


def fail_behind(database: Any, patch: pytest.MonkeyPatch, *, claims: int) -> None:
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
        fail_behind(harness.store.database, patch, claims=0)
        with pytest.raises(StoreUnreachable):
            await harness.store.leases.claim("w1", pairs, slots=10, ttl=TTL)
    with monkeypatch.context() as patch:
        fail_behind(harness.store.database, patch, claims=1)
        claimed = (await harness.store.leases.claim("w2", pairs, slots=10, ttl=TTL)).claimed
    assert sorted(lease.tenant for lease in claimed) == ["a", "b"]
    pulse = await harness.store.leases.beat("w2", claimed, ttl=TTL)
    assert [beat.answer for beat in pulse.jobs] == ["yours", "yours"]


async def test_beat_just_after_the_reaper_does_not_revive_a_lease(harness: StoreHarness) -> None:
    """Proves L4, L5."""
    lease = await orphan(harness)
    assert [beat.answer for beat in (await harness.store.leases.beat("w1", [lease], ttl=TTL)).jobs] == ["lost"]
    assert (await harness.get(lease)).lease is None
    assert await harness.finish(lease) is None


async def test_beat_answers_for_every_job_in_one_call(harness: StoreHarness) -> None:
    """Proves L5."""
    jobs = [await harness.submit() for _ in range(4)]
    mine, stopping, taken, unknown = await harness.claim()
    await harness.store.jobs.cancel(jobs[1].id)
    await harness.finish(taken)
    pulse = await harness.store.leases.beat("w1", [mine, stopping, taken], ttl=TTL)
    answers = {beat.id: beat for beat in pulse.jobs}
    assert {job_id: beat.answer for job_id, beat in answers.items()} == {
        mine.id: "yours",
        stopping.id: "yours",
        taken.id: "lost",
        unknown.id: "unknown",
    }
    stop = answers[stopping.id].stop_request
    assert stop is not None
    assert stop.kind is StopKind.CANCEL
    assert answers[mine.id].stop_request is None
    assert not pulse.registered


async def test_beat_distinguishes_two_leases_of_one_job(harness: StoreHarness) -> None:
    """Proves L4, L5."""
    await harness.submit()
    (old,) = await harness.claim()
    await harness.store.leases.hand_over([old])
    (new,) = await harness.adopt(worker="w1")
    pulse = await harness.store.leases.beat("w1", [old, new], ttl=TTL)
    assert {(beat.token, beat.answer) for beat in pulse.jobs} == {(old.token, "lost"), (new.token, "yours")}


async def test_write_about_one_job_touches_no_other_with_the_same_token(harness: StoreHarness) -> None:
    """Proves L4."""
    for _ in range(2):
        await harness.submit(runner="process", spec={"command": ["true"]})
    mine, other = await harness.claim_process()
    assert mine.token == other.token
    await harness.store.jobs.cancel(mine.id)
    await harness.store.jobs.cancel(other.id)
    before = await harness.get(other), await harness.events(other)
    leases = harness.store.leases
    await harness.advance(1)
    await leases.start([mine])
    await leases.beat("w1", [mine], ttl=TTL)
    await leases.advance_stop(mine, StopPhase.SIGNALLED, grace=5)
    await leases.hand_over([mine])
    (adopted,) = await harness.adopt(worker="w2")
    assert adopted.id == mine.id
    assert await harness.finish(adopted, Outcome.requeued(Cause.DRAINED)) is Status.CANCELLED
    assert (await harness.get(other), await harness.events(other)) == before
    assert await harness.finish(other) is Status.SUCCEEDED


async def test_expired_lease_can_be_renewed_until_it_is_reaped(harness: StoreHarness) -> None:
    """Proves L7."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    await harness.advance(3 * TTL)
    pulse = await harness.store.leases.beat("w1", [lease], ttl=TTL)
    assert pulse.jobs[0].answer == "yours"
    assert await harness.store.leases.reap() == []
    await harness.advance(3 * TTL)
    assert await harness.finish(lease) is Status.SUCCEEDED
    assert await harness.status(job) is Status.SUCCEEDED


@pytest.mark.parametrize("lane", [None, "L"])
async def test_finish_repeated_after_a_lost_reply_is_idempotent(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch, lane: str | None
) -> None:
    """Proves L7, L9."""
    await harness.submit(lane=lane)
    (lease,) = await harness.claim()
    database = harness.store.database
    method = "values" if lane is None else "transact"
    original = getattr(database, method)

    async def cut(*args: object, **kwargs: object) -> object:
        await original(*args, **kwargs)
        raise StoreUnreachable("cut right after the commit")

    monkeypatch.setattr(database, method, cut)
    with pytest.raises(StoreUnreachable):
        await harness.finish(lease, Outcome.succeeded("mine"))
    monkeypatch.undo()
    assert await harness.finish(lease, Outcome.succeeded("mine")) is Status.SUCCEEDED
    assert await harness.finish(lease, Outcome.failed("late", "late")) is Status.SUCCEEDED
    job = await harness.get(lease)
    assert (job.status, job.result) == (Status.SUCCEEDED, "mine")
    assert [event.data["status"] for event in await harness.events(lease)] == ["queued", "running", "succeeded"]


async def test_requeue_repeated_after_a_lost_reply_is_idempotent(harness: StoreHarness) -> None:
    """Proves L7."""
    await harness.submit(max_attempts=2)
    (lease,) = await harness.claim()
    assert await harness.finish(lease, RETRY) is Status.QUEUED
    assert await harness.finish(lease, RETRY) is Status.QUEUED
    assert len(await harness.store.attempts.list(lease.id)) == 1
    (again,) = await harness.claim()
    assert await harness.finish(lease, RETRY) is None
    assert (again.attempt, again.token) == (2, lease.token + 1)


async def test_finish_clears_the_lease_and_opens_lane_and_dependants(harness: StoreHarness) -> None:
    """Proves L9."""
    first = await harness.submit(lane="L")
    second = await harness.submit(lane="L")
    dependant = await harness.submit(needs=[first.id])
    (lease,) = await harness.claim()
    assert lease.id == first.id
    await harness.finish(lease)
    assert (await harness.get(first)).lease is None
    assert {lease.id for lease in await harness.claim()} == {second.id, dependant.id}


async def test_many_finish_in_one_call_each_with_its_answer(harness: StoreHarness) -> None:
    """Proves L9."""
    for n in range(6):
        await harness.submit(lane="L" if n == 5 else None, max_attempts=3)
    a, b, c, d, stale, laned = await harness.claim()
    await harness.finish(stale)
    answers = await harness.store.leases.finish(
        [
            (a, Outcome.succeeded({"n": 1})),
            (b, Outcome.failed("exit_nonzero", "boom", exit_code=3)),
            (c, Outcome(status=Status.TIMED_OUT, cause=Cause.TIMED_OUT, exit_code=124)),
            (d, RETRY),
            (laned, Outcome.succeeded()),
        ]
    )
    assert answers == {a.id: "succeeded", b.id: "failed", c.id: "timed_out", d.id: "queued", laned.id: "succeeded"}
    assert (await harness.get(b)).exit_code == 3


async def test_finish_refuses_a_job_named_twice_and_results_that_cannot_be_kept(harness: StoreHarness) -> None:
    await harness.submit()
    (lease,) = await harness.claim()
    with pytest.raises(Invalid, match="twice"):
        await harness.store.leases.finish([(lease, Outcome.succeeded()), (lease, Outcome.succeeded())])
    with pytest.raises(TooLarge, match="result"):
        await harness.finish(lease, Outcome.succeeded("x" * 1024 * 1025))
    with pytest.raises(Invalid, match="result"):
        await harness.finish(lease, Outcome.succeeded(object()))
    assert await harness.status(lease) is Status.RUNNING


async def test_reaper_clears_the_lease_and_nothing_else(harness: StoreHarness) -> None:
    """Proves L10."""
    await harness.submit(queue="other", **PROCESS)
    pair = Claimable(queue="other", capability="process", domain="host-a")
    (lease,) = (await harness.store.leases.claim("w1", [pair], slots=1, ttl=TTL)).claimed
    before = await harness.get(lease)
    await harness.advance(TTL - 1)
    assert await harness.store.leases.reap() == []
    await harness.advance(2)
    (reaped,) = await harness.store.leases.reap()
    assert (reaped.id, reaped.worker, reaped.attempt) == (lease.id, "w1", 1)
    after = await harness.get(lease)
    assert (after.status, after.attempts, after.attempt) == (Status.RUNNING, before.attempts, before.attempt)
    assert after.lease is None
    assert after.orphaned_at == harness.clock.now()
    assert (await harness.events(lease))[-1].data == {"lease": "reaped", "worker": "w1", "token": lease.token + 1}


async def test_reaper_bounds_one_pass(harness: StoreHarness) -> None:
    """Proves L10."""
    for _ in range(5):
        await harness.submit()
    await harness.claim()
    await harness.advance(TTL + 1)
    assert [len(await harness.store.leases.reap(limit=2)) for _ in range(4)] == [2, 2, 1, 0]


async def test_reaper_with_a_wrong_clock_reaps_nothing(harness: StoreHarness) -> None:
    """Proves L17."""
    await harness.submit()
    (lease,) = await harness.claim()
    reaper = Reaper(harness.store, ttl=TTL)
    assert await reaper.run_once() == 0
    # This host's clock falls hours behind the one that beats.
    await harness.advance(-4 * 3600)
    assert await reaper.run_once() == 0
    await harness.advance(4 * 3600)
    # And hours ahead of one that still beats: what looks expired is being renewed.
    ahead = ManualClock(START)
    ahead.advance(4 * 3600)
    if harness.kind == "postgres":
        ahead = harness.clock  # Differs: one clock for all, so nothing looks expired in the first place.
    async with Store(await connect(harness.url, listen=False, clock=ahead)) as wrong:
        reaper = Reaper(wrong, ttl=TTL)
        for _ in range(3):
            assert await reaper.run_once() == 0
            await harness.advance(TTL / 3)
            assert (await harness.store.leases.beat("w1", [lease], ttl=TTL)).jobs[0].answer == "yours"
    assert await harness.finish(lease) is Status.SUCCEEDED


async def test_stored_times_come_from_the_database(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves L17."""
    monkeypatch.setattr("time.time_ns", lambda: 4_000_000_000_000_000_000)
    job = await harness.submit()
    (lease,) = await harness.claim()
    await harness.finish(lease)
    job = await harness.get(job)
    assert {job.requested_at, job.started_at, job.finished_at} == {START}


async def test_stored_times_never_go_back(harness: StoreHarness) -> None:
    """Proves J3."""
    job = await harness.submit()
    await harness.advance(-50)
    (lease,) = await harness.claim()
    await harness.advance(-50)
    await harness.finish(lease)
    job = await harness.get(job)
    assert job.started_at is not None
    assert job.finished_at is not None
    assert job.requested_at <= job.started_at <= job.finished_at
    assert [event.at for event in await harness.events(job)] == sorted(event.at for event in await harness.events(job))


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.requeued(Cause.LOST, delay=5, error=Error(code="lost", message="gone")), Status.QUEUED),
        (Outcome.failed("lost", "gone", cause=Cause.LOST), Status.FAILED),
        (
            Outcome(status=Status.PAUSED, cause=Cause.LOST, error=Error(code="lost", message="gone")),
            Status.PAUSED,
        ),
    ],
)
async def test_a_loss_ends_as_its_policy_says(harness: StoreHarness, outcome: Outcome, status: Status) -> None:
    """Proves L11, L13."""
    dead = await orphan(harness, max_attempts=2)
    (lease,) = await harness.adopt()
    assert await harness.finish(lease, outcome) is status
    job = await harness.get(dead)
    assert job.attempts == 1
    assert job.error == Error(code="lost", message="gone")
    (attempt,) = await harness.store.attempts.list(dead.id)
    assert attempt.cause is Cause.LOST
    if status is Status.QUEUED:
        await harness.advance(6)
        await harness.store.gates.promote()
        (again,) = await harness.claim_process()
        assert (again.attempt, again.spent, again.attempts_left) == (2, 1, 0)


async def test_policy_reaches_the_worker(harness: StoreHarness) -> None:
    """Proves L11."""
    retry = {"base": 1, "cap": 8, "on": ["failed", "timed_out"]}
    await harness.submit(on_lost="pause", retry=retry, timeout=9, stop_grace=0)
    (lease,) = await harness.claim()
    policy = lease.policy
    assert (policy.on_lost, policy.timeout, policy.stop_grace, policy.idle_timeout) == ("pause", 9, 0, None)
    assert (policy.retry.base, policy.retry.cap, policy.retry.on) == (1, 8, ("failed", "timed_out"))
    assert (await harness.get(lease)).policy == policy


def test_backoff_doubles_up_to_its_cap() -> None:
    """Proves L12."""
    assert [backoff(n, base=5, cap=300) for n in range(1, 9)] == [5, 10, 20, 40, 80, 160, 300, 300]
    assert backoff(10_000, base=5, cap=300) == 300


async def test_retry_waits_its_backoff(harness: StoreHarness) -> None:
    """Proves L12."""
    await harness.submit(max_attempts=5)
    for n in (1, 2, 3):
        (lease,) = await harness.claim()
        delay = backoff(n, base=5, cap=300)
        await harness.finish(lease, Outcome.requeued(Cause.EXIT, delay=delay))
        assert await harness.store.next_due() == delay
        await harness.advance(delay - 1)
        assert await harness.store.gates.promote() == 0
        await harness.advance(1)
        assert await harness.store.gates.promote() == 1


async def test_attempts_count_what_started_and_was_not_drained(harness: StoreHarness) -> None:
    """Proves L13."""
    job = await harness.submit(**PROCESS)
    (lease,) = await harness.claim_process()
    assert (lease.adoption.phase, (await harness.get(job)).attempts) == (Phase.CLAIMED, 0)
    # Drained before the start: not counted, its ordinal not reused.
    await harness.finish(lease, Outcome.requeued(Cause.DRAINED))
    assert (await harness.get(job)).attempts == 0
    (lease,) = await harness.claim_process()
    assert (lease.attempt, lease.spent) == (2, 0)
    assert await harness.store.leases.start([lease]) == {job.id}
    assert (await harness.get(job)).attempts == 1
    # A start that fails counts.
    await harness.finish(lease, Outcome.requeued(Cause.START_FAILED))
    assert (await harness.get(job)).attempts == 1
    attempts = await harness.store.attempts.list(job.id)
    assert [(a.attempt, a.cause) for a in attempts] == [(1, "drained"), (2, "start_failed")]


async def test_drained_function_is_not_counted(harness: StoreHarness) -> None:
    """Proves L13."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    assert (await harness.get(job)).attempts == 1
    await harness.finish(lease, Outcome.requeued(Cause.DRAINED))
    assert (await harness.get(job)).attempts == 0
    (lease,) = await harness.claim()
    assert (lease.attempt, lease.spent) == (2, 0)


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
