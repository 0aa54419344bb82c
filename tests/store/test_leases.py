"""Leases: beat, finish, requeue and reap are fenced by the token and safe to repeat; times are the database's."""

import pytest

from holdfast.duties.reaper import Reaper
from holdfast.errors import Invalid, StoreUnreachable, TooLarge
from holdfast.model import Cause, Claimable, Error, Outcome, Status, StopKind, StopPhase
from holdfast.store.store import Store, connect
from holdfast.timing import ManualClock
from tests.support.job_states import PROCESS, orphan
from tests.support.store_harness import START, TTL, StoreHarness

RETRY = Outcome.requeued(Cause.EXIT, error=Error(code="exit_nonzero", message="boom"))


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
    # This host's clock is hours late, compared with that of the worker that beats.
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
