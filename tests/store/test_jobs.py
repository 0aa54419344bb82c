"""What callers do with a job after its submit: release, resume, resolve, dismiss; and which moves are legal."""

from collections.abc import Awaitable, Callable

import pytest

from holdfast.errors import Conflict, HoldfastError, IllegalMove, NeedFailed, NotFound
from holdfast.model import MOVES, Cause, Error, Gate, Lease, Outcome, Status, Verb, new_id
from holdfast.store.store import Store, connect
from tests.support.job_states import PROCESS, in_status
from tests.support.store_harness import StoreHarness

CALLERS_VERBS = (Verb.RELEASE, Verb.CANCEL, Verb.INTERRUPT, Verb.RESUME, Verb.RESOLVE, Verb.DISMISS)


async def test_held_job_waits_for_its_release(harness: StoreHarness) -> None:
    """Proves J6."""
    job = await harness.submit(hold=True)
    assert (job.status, job.gate) == (Status.PENDING, Gate.HELD)
    assert await harness.claim() == []
    released = await harness.store.jobs.release(job.id, by="ada")
    assert (released.status, released.gate) == (Status.QUEUED, Gate.OPEN)
    assert [event.type for event in await harness.events(job)] == ["status", "audit", "status"]
    assert (await harness.run_one()).id == job.id


async def last_status_event(harness: StoreHarness, job_id: str) -> str:
    return str([event.data["status"] for event in await harness.events(job_id) if event.type == "status"][-1])


@pytest.mark.parametrize("status", Status)
async def test_only_the_moves_of_the_table_are_possible(harness: StoreHarness, status: Status) -> None:
    """Proves J4."""
    jobs = harness.store.jobs
    calls: dict[Verb, Callable[[str], Awaitable[object]]] = {
        Verb.RELEASE: jobs.release,
        Verb.CANCEL: jobs.cancel,
        Verb.INTERRUPT: jobs.interrupt,
        Verb.RESUME: jobs.resume,
        Verb.RESOLVE: jobs.resolve,
        Verb.DISMISS: jobs.dismiss,
    }
    for verb in CALLERS_VERBS:
        job = await in_status(harness, status)
        before, events = await harness.get(job), await harness.events(job)
        if status in MOVES[verb]:
            await calls[verb](job.id)
            assert await harness.status(job) in MOVES[verb][status]
            assert await last_status_event(harness, job.id) == await harness.status(job)
            await harness.store.jobs.delete(job.id, force=True)
            continue
        words = rf"cannot {verb} job {job.id}: it is {status}, and {verb} needs one of: \w+"
        with pytest.raises(IllegalMove, match=words):
            await calls[verb](job.id)
        assert (await harness.get(job), await harness.events(job)) == (before, events)
        await harness.store.jobs.delete(job.id, force=True)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.RUNNING])
async def test_worker_can_finish_only_what_runs(harness: StoreHarness, status: Status) -> None:
    """Proves J4."""
    job = await in_status(harness, status)
    before, events = await harness.get(job), await harness.events(job)
    forged = Lease(job.id, 99, 1, "function", "default", "default", "function:f", None, "run", 0, 1, "{}", "{}")
    assert await harness.finish(forged) is None
    assert (await harness.get(job), await harness.events(job)) == (before, events)


async def test_record_and_last_status_event_agree_after_every_move(harness: StoreHarness) -> None:
    """Proves J2, J3."""
    job = await harness.submit(hold=True, max_attempts=9)

    async def agree(status: Status) -> None:
        record, events = await harness.get(job), await harness.events(job)
        statuses = [event for event in events if event.type == "status"]
        assert record.status is status
        assert statuses[-1].data["status"] == status
        assert statuses[-1].at == record.updated_at == harness.clock.now()
        assert [event.seq for event in events] == list(range(1, record.last_seq + 1))
        assert (record.finished_at is not None) == status.terminal
        if record.finished_at is not None:
            assert record.requested_at <= (record.started_at or record.requested_at) <= record.finished_at
        await harness.advance(1)

    await agree(Status.PENDING)
    await harness.store.jobs.release(job.id)
    await agree(Status.QUEUED)
    (lease,) = await harness.claim()
    await agree(Status.RUNNING)
    await harness.finish(lease, Outcome.requeued(Cause.EXIT))
    await agree(Status.QUEUED)
    (lease,) = await harness.claim()
    await harness.finish(lease, Outcome(status=Status.PAUSED, cause=Cause.INTERRUPTED))
    await agree(Status.PAUSED)
    await harness.store.jobs.resume(job.id)
    (lease,) = await harness.claim()
    await harness.fail(lease)
    await agree(Status.FAILED)
    await harness.store.jobs.resume(job.id)
    await agree(Status.QUEUED)
    await harness.store.jobs.cancel(job.id)
    await agree(Status.CANCELLED)
    await harness.store.jobs.resume(job.id)
    (lease,) = await harness.claim()
    await harness.finish(lease, Outcome(status=Status.TIMED_OUT, cause=Cause.TIMED_OUT))
    await agree(Status.TIMED_OUT)
    await harness.store.jobs.resolve(job.id, {"by": "hand"})
    await agree(Status.SUCCEEDED)


async def test_over_budget_is_a_failure_that_is_not_retried(harness: StoreHarness) -> None:
    """Proves C6."""
    job = await harness.submit(budget={"tokens": 10}, max_attempts=5)
    (lease,) = await harness.claim()
    assert lease.policy.budget == {"tokens": 10}
    await harness.finish(lease, Outcome.failed("budget_exceeded", "used 12 of 10 tokens", cause=Cause.CANCELLED))
    record = await harness.get(job)
    assert (record.status, record.error and record.error.code) == (Status.FAILED, "budget_exceeded")
    resumed = await harness.store.jobs.resume(job.id, budget={"tokens": 20})
    assert resumed.policy.budget == {"tokens": 20}
    (lease,) = await harness.claim()
    assert lease.policy.budget == {"tokens": 20}


async def test_resume_allows_one_more_attempt_and_clears_the_end(harness: StoreHarness) -> None:
    """Proves C8."""
    job = await in_status(harness, Status.FAILED)
    resumed = await harness.store.jobs.resume(job.id, by="ada", reason="disk is back")
    assert (resumed.status, resumed.finished_at, resumed.max_attempts) == (Status.QUEUED, None, 2)
    assert resumed.error == Error(code="exit_nonzero", message="boom")  # of the last attempt, until the next one ends
    assert resumed.started_at == job.started_at
    audit = [event.data for event in await harness.events(job) if event.type == "audit"]
    assert audit == [{"action": "resume", "by": "ada", "reason": "disk is back"}]
    await harness.run_one()
    record = await harness.get(job)
    assert (record.status, record.error, record.attempts) == (Status.SUCCEEDED, None, 2)


async def test_resolve_ends_a_failed_job_with_a_person_s_result(harness: StoreHarness) -> None:
    """Proves C8."""
    job = await in_status(harness, Status.FAILED)
    resolved = await harness.store.jobs.resolve(job.id, {"ok": 1}, by="ada", reason="done by hand")
    assert (resolved.status, resolved.result, resolved.error) == (Status.SUCCEEDED, {"ok": 1}, None)


async def test_resume_of_an_attempt_that_may_still_run_needs_confirmation(harness: StoreHarness) -> None:
    """Proves C8."""
    job = await harness.submit(**PROCESS)
    await harness.claim_process()
    for _ in range(5):
        await harness.advance(3600)
        await harness.store.leases.reap()
        await harness.advance(3600)
        await harness.adopt()
    await harness.advance(3600)
    await harness.store.leases.reap()
    assert await harness.store.leases.abandon() == 1
    with pytest.raises(Conflict, match=r"attempt 1 may still run in host-a; .*stopped=true"):
        await harness.store.jobs.resume(job.id)
    await harness.store.jobs.resume(job.id, stopped=True)
    (attempt,) = await harness.store.attempts.list(job.id)
    assert (attempt.attempt, attempt.cause) == (1, Cause.LOST)
    (lease,) = await harness.claim_process()
    assert lease.attempt == 2


async def test_queue_timeout_ends_a_job_that_nobody_claims(harness: StoreHarness) -> None:
    job = await harness.submit(queue_timeout=60, available_at=harness.later(30).isoformat())
    claimed = await harness.submit(queue_timeout=60, spec={"name": "g"})
    await harness.claim(name="g")
    await harness.advance(89)
    assert await harness.store.jobs.expire() == 0
    await harness.advance(2)
    assert await harness.store.jobs.expire() == 1
    record = await harness.get(job)
    assert (record.status, record.error and record.error.code) == (Status.TIMED_OUT, "queue_timeout")
    assert await harness.status(claimed) is Status.RUNNING


async def test_dismiss_keeps_a_partial_result(harness: StoreHarness) -> None:
    """Proves C8."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    error = Error(code="exit_nonzero", message="boom")
    await harness.finish(lease, Outcome(status=Status.FAILED, error=error, result={"partial": True}))
    dismissed = await harness.store.jobs.dismiss(job.id)
    assert (dismissed.result, dismissed.error) == ({"partial": True}, error)


async def test_foreign_and_unknown_ids_are_not_found(harness: StoreHarness) -> None:
    job = await harness.submit(tenant="someone")
    jobs = harness.store.jobs
    for job_id in (job.id, new_id(), "nonsense"):
        for call in (jobs.get, jobs.release, jobs.cancel, jobs.interrupt, jobs.resume, jobs.resolve, jobs.dismiss):
            with pytest.raises(NotFound):
                await call(job_id)
        with pytest.raises(NotFound):
            await jobs.delete(job_id, force=True)
        for reader in (harness.store.events.page, harness.store.attempts.list):
            with pytest.raises(NotFound):
                await reader(job_id)
    assert (await jobs.get(job.id, tenant="someone")).status is Status.QUEUED


async def test_resume_with_a_failed_need_names_it(harness: StoreHarness) -> None:
    """Proves C8."""
    parent = await harness.submit()
    child = await harness.submit(needs=[parent.id])
    (lease,) = await harness.claim()
    await harness.fail(lease)
    with pytest.raises(NeedFailed, match=parent.id):
        await harness.store.jobs.resume(child.id)


async def test_closed_store_says_so(harness: StoreHarness) -> None:
    store = Store(await connect(harness.url, listen=False, clock=harness.clock))
    await store.close()
    with pytest.raises(HoldfastError):
        await store.jobs.list()
