"""What callers do with jobs: submit, read, list, release, stop, resume, resolve, dismiss, delete."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import Conflict, HoldfastError, IllegalMove, Invalid, NeedFailed, NotFound
from holdfast.model import (
    MOVES,
    Cause,
    Error,
    Gate,
    Job,
    Lease,
    Outcome,
    Status,
    StopKind,
    StopPhase,
    Verb,
    new_id,
)
from holdfast.store import open_store
from holdfast.store.store import Store, connect
from tests.support.store_fixture import START, TTL, Stage

PROCESS = {"runner": "process", "spec": {"command": ["true"]}}
CALLERS_VERBS = (Verb.RELEASE, Verb.CANCEL, Verb.INTERRUPT, Verb.RESUME, Verb.RESOLVE, Verb.DISMISS)


async def in_status(stage: Stage, status: Status, **fields: Any) -> Job:
    """A job that went to a status on an ordinary way."""
    if status is Status.PENDING:
        return await stage.submit(hold=True, **fields)
    job = await stage.submit(**fields)
    if status is Status.CANCELLED:
        await stage.store.jobs.cancel(job.id)
    elif status is not Status.QUEUED:
        (lease,) = await stage.claim()
        if status is not Status.RUNNING:
            error = None if status is Status.SUCCEEDED else Error(code="exit_nonzero", message="boom")
            await stage.finish(lease, Outcome(status=status, error=error))
    assert await stage.status(job) is status
    return await stage.get(job)


async def last_status_event(stage: Stage, job_id: str) -> str:
    return str([event.data["status"] for event in await stage.events(job_id) if event.type == "status"][-1])


async def test_submitted_job_is_readable_at_once_and_as_it_was_asked(stage: Stage) -> None:
    """Proves J3."""
    asked = {
        **PROCESS,
        "kind": "build",
        "queue": "heavy",
        "priority": 3,
        "labels": {"team": "blue"},
        "inputs": {"rows": [1, {"a": None}], "text": "ü"},
        "max_attempts": 4,
        "timeout": 3600,
        "budget": {"tokens": 500000},
        "secrets": ["DB"],
        "stop_after": 90,
    }
    job = await stage.submit(**asked)
    assert job == await stage.get(job.id.upper())
    assert (job.status, job.gate, job.attempts, job.attempt) == (Status.QUEUED, Gate.OPEN, 0, 0)
    assert (job.kind, job.queue, job.priority, job.labels) == ("build", "heavy", 3, {"team": "blue"})
    assert (job.spec, job.inputs) == (asked["spec"], asked["inputs"])
    assert (job.max_attempts, job.policy.timeout, job.policy.stop_after) == (4, 3600, 90)
    assert (job.policy.budget, job.policy.secrets) == ({"tokens": 500000}, ("DB",))
    assert (job.requested_at, job.started_at, job.finished_at) == (START, None, None)


async def test_ids_may_be_given_and_are_never_taken_twice(stage: Stage) -> None:
    given = new_id()
    assert (await stage.submit(id=given)).id == given
    for other in ("default", "someone"):
        with pytest.raises(Conflict, match=given):
            await stage.submit(id=given, tenant=other)
    with pytest.raises(Conflict, match=given):
        await stage.store.jobs.submit_many([{**PROCESS}, {**PROCESS, "id": given}])
    assert len((await stage.store.jobs.list()).items) == 1


async def test_job_is_in_the_database_when_submit_returns(stage: Stage) -> None:
    """Proves J1."""
    async with await open_store(stage.url, listen=False, clock=stage.clock) as other:
        for _ in range(100):
            job = await stage.submit()
            seen = await other.jobs.get(job.id)
            assert (seen.status, seen.gate, seen.attempts, seen.started_at) == (Status.QUEUED, Gate.OPEN, 0, None)


async def test_ten_thousand_jobs_in_one_call(stage: Stage) -> None:
    ids = await stage.store.jobs.submit_many([{**PROCESS, "inputs": {"n": n}} for n in range(10_000)])
    assert len(set(ids)) == 10_000
    assert (await stage.get(ids[-1])).inputs == {"n": 9_999}
    assert len(await stage.claim_process(slots=50)) == 50
    with pytest.raises(Invalid, match="10001 jobs"):
        await stage.store.jobs.submit_many([PROCESS] * 10_001)
    with pytest.raises(Invalid, match="0 jobs"):
        await stage.store.jobs.submit_many([])


async def test_batch_is_all_or_nothing(stage: Stage) -> None:
    with pytest.raises(Invalid, match="command"):
        await stage.store.jobs.submit_many([PROCESS, {"runner": "process", "spec": {}}])
    with pytest.raises(NotFound):
        await stage.store.jobs.submit_many([PROCESS, {**PROCESS, "needs": [new_id()]}])
    assert (await stage.store.jobs.list()).items == []


async def test_held_job_waits_for_its_release(stage: Stage) -> None:
    """Proves J6."""
    job = await stage.submit(hold=True)
    assert (job.status, job.gate) == (Status.PENDING, Gate.HELD)
    assert await stage.claim() == []
    released = await stage.store.jobs.release(job.id, by="ada")
    assert (released.status, released.gate) == (Status.QUEUED, Gate.OPEN)
    assert [event.type for event in await stage.events(job)] == ["status", "audit", "status"]
    assert (await stage.run_one()).id == job.id


async def test_delayed_job_is_claimable_when_due_and_the_next_due_time_is_known(stage: Stage) -> None:
    """Proves J7."""
    assert await stage.store.next_due() is None
    job = await stage.submit(available_at=stage.later(90).isoformat())
    await stage.submit(available_at=stage.later(900).isoformat())
    assert job.gate is Gate.FUTURE
    assert await stage.store.next_due() == 90
    await stage.advance(89.9)
    assert await stage.store.gates.promote() == 0
    assert await stage.claim() == []
    await stage.advance(0.1)
    assert await stage.store.next_due() == 0
    assert await stage.store.gates.promote() == 1
    assert [lease.id for lease in await stage.claim()] == [job.id]


async def test_due_time_in_the_past_means_now(stage: Stage) -> None:
    """Proves J7."""
    job = await stage.submit(available_at=stage.later(-90).isoformat())
    assert (job.gate, job.available_at) == (Gate.OPEN, START)


@pytest.mark.parametrize("status", Status)
async def test_only_the_moves_of_the_table_are_possible(stage: Stage, status: Status) -> None:
    """Proves J4."""
    jobs = stage.store.jobs
    calls: dict[Verb, Callable[[str], Awaitable[object]]] = {
        Verb.RELEASE: jobs.release,
        Verb.CANCEL: jobs.cancel,
        Verb.INTERRUPT: jobs.interrupt,
        Verb.RESUME: jobs.resume,
        Verb.RESOLVE: jobs.resolve,
        Verb.DISMISS: jobs.dismiss,
    }
    for verb in CALLERS_VERBS:
        job = await in_status(stage, status)
        before, events = await stage.get(job), await stage.events(job)
        if status in MOVES[verb]:
            await calls[verb](job.id)
            assert await stage.status(job) in MOVES[verb][status]
            assert await last_status_event(stage, job.id) == await stage.status(job)
            await stage.store.jobs.delete(job.id, force=True)
            continue
        words = rf"cannot {verb} job {job.id}: it is {status}, and {verb} needs one of: \w+"
        with pytest.raises(IllegalMove, match=words):
            await calls[verb](job.id)
        assert (await stage.get(job), await stage.events(job)) == (before, events)
        await stage.store.jobs.delete(job.id, force=True)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.RUNNING])
async def test_worker_can_finish_only_what_runs(stage: Stage, status: Status) -> None:
    """Proves J4."""
    job = await in_status(stage, status)
    before, events = await stage.get(job), await stage.events(job)
    forged = Lease(job.id, 99, 1, "function", "default", "default", "function:f", None, "run", 0, 1, "{}", "{}")
    assert await stage.finish(forged) is None
    assert (await stage.get(job), await stage.events(job)) == (before, events)


async def test_record_and_last_status_event_agree_after_every_move(stage: Stage) -> None:
    """Proves J2, J3."""
    job = await stage.submit(hold=True, max_attempts=9)

    async def agree(status: Status) -> None:
        record, events = await stage.get(job), await stage.events(job)
        statuses = [event for event in events if event.type == "status"]
        assert record.status is status
        assert statuses[-1].data["status"] == status
        assert statuses[-1].at == record.updated_at == stage.clock.now()
        assert [event.seq for event in events] == list(range(1, record.last_seq + 1))
        assert (record.finished_at is not None) == status.terminal
        if record.finished_at is not None:
            assert record.requested_at <= (record.started_at or record.requested_at) <= record.finished_at
        await stage.advance(1)

    await agree(Status.PENDING)
    await stage.store.jobs.release(job.id)
    await agree(Status.QUEUED)
    (lease,) = await stage.claim()
    await agree(Status.RUNNING)
    await stage.finish(lease, Outcome.requeued(Cause.EXIT))
    await agree(Status.QUEUED)
    (lease,) = await stage.claim()
    await stage.finish(lease, Outcome(status=Status.PAUSED, cause=Cause.INTERRUPTED))
    await agree(Status.PAUSED)
    await stage.store.jobs.resume(job.id)
    (lease,) = await stage.claim()
    await stage.fail(lease)
    await agree(Status.FAILED)
    await stage.store.jobs.resume(job.id)
    await agree(Status.QUEUED)
    await stage.store.jobs.cancel(job.id)
    await agree(Status.CANCELLED)
    await stage.store.jobs.resume(job.id)
    (lease,) = await stage.claim()
    await stage.finish(lease, Outcome(status=Status.TIMED_OUT, cause=Cause.TIMED_OUT))
    await agree(Status.TIMED_OUT)
    await stage.store.jobs.resolve(job.id, {"by": "hand"})
    await agree(Status.SUCCEEDED)


async def test_job_cancelled_before_its_start_is_readable_everywhere(stage: Stage) -> None:
    """Proves J3, J5."""
    job = await stage.submit(lane="L")
    await stage.advance(5)
    answer = await stage.store.jobs.cancel(job.id, by="ada", reason="wrong file")
    assert answer.outcome == "ended"
    record = await stage.get(job)
    assert (record.status, record.started_at, record.finished_at) == (Status.CANCELLED, None, stage.clock.now())
    assert record.error == Error(code="cancelled", message="cancelled before it started: wrong file")
    (listed,) = (await stage.store.jobs.list(status=[Status.CANCELLED])).items
    assert listed == record
    audit = [event.data for event in await stage.events(job) if event.type == "audit"]
    assert audit == [{"action": "cancel", "by": "ada", "reason": "wrong file"}]
    assert await stage.store.attempts.list(job.id) == []
    assert (await stage.store.lanes.get("L")).depth == 0


async def test_cancel_is_answered_by_the_state_of_the_job(stage: Stage) -> None:
    """Proves C1."""
    running = await in_status(stage, Status.RUNNING)
    assert [(await stage.store.jobs.cancel(running.id)).outcome for _ in range(2)] == ["stopping", "stopping"]
    requests = [event for event in await stage.events(running) if event.type == "cancel"]
    assert [event.data for event in requests] == [{"cancel": "requested", "kind": "cancel"}]
    waiting = await stage.submit()
    assert [(await stage.store.jobs.cancel(waiting.id)).outcome for _ in range(2)] == ["ended", "already"]


async def test_later_stop_request_only_escalates(stage: Stage) -> None:
    """Proves C1."""
    job = await in_status(stage, Status.RUNNING)

    async def kind() -> StopKind | None:
        request = (await stage.get(job)).stop_request
        return None if request is None else request.kind

    await stage.store.jobs.interrupt(job.id)
    assert await kind() is StopKind.INTERRUPT
    await stage.store.jobs.cancel(job.id)
    assert await kind() is StopKind.CANCEL
    await stage.store.jobs.interrupt(job.id)
    assert await kind() is StopKind.CANCEL
    await stage.store.jobs.delete(job.id, force=True)
    assert await kind() is StopKind.DELETE
    await stage.store.jobs.cancel(job.id)
    assert await kind() is StopKind.DELETE


@pytest.mark.parametrize("lane", [None, "L"])
@pytest.mark.parametrize(
    ("stop", "status", "code"),
    [("cancel", Status.CANCELLED, "cancelled"), ("interrupt", Status.PAUSED, "interrupted")],
)
async def test_stop_request_turns_a_requeue_into_the_stop(
    stage: Stage, stop: str, status: Status, code: str, lane: str | None
) -> None:
    """Proves C1, C6."""
    job = await stage.submit(max_attempts=3, lane=lane)
    (lease,) = await stage.claim()
    await getattr(stage.store.jobs, stop)(job.id)
    assert await stage.finish(lease, Outcome.requeued(Cause.EXIT, delay=5)) is status
    record = await stage.get(job)
    assert (record.status, record.error and record.error.code) == (status, code)
    assert await stage.claim() == []


async def test_only_resume_clears_a_stop_request(stage: Stage) -> None:
    """Proves C1, C8."""
    job = await stage.submit(**PROCESS, max_attempts=3)
    (lease,) = await stage.claim_process()
    await stage.store.jobs.interrupt(job.id)
    await stage.advance(TTL + 1)
    await stage.store.leases.reap()
    (lease,) = await stage.adopt()
    assert lease.adoption.stop_request is not None
    await stage.finish(lease, Outcome.requeued(Cause.LOST))
    assert await stage.status(job) is Status.PAUSED
    resumed = await stage.store.jobs.resume(job.id)
    assert resumed.stop_request is None
    (lease,) = await stage.claim_process()
    assert lease.adoption.stop_request is None
    assert await stage.store.leases.stops("w1") == {}


async def test_interrupt_pauses_what_runs_and_cancels_what_waits(stage: Stage) -> None:
    """Proves C6."""
    running = await in_status(stage, Status.RUNNING)
    assert (await stage.store.jobs.interrupt(running.id)).outcome == "stopping"
    waiting, held = await stage.submit(), await stage.submit(hold=True)
    for job in (waiting, held):
        assert (await stage.store.jobs.interrupt(job.id)).job.status is Status.CANCELLED
    paused = await in_status(stage, Status.PAUSED)
    assert (await stage.store.jobs.interrupt(paused.id)).outcome == "already"
    assert await stage.status(paused) is Status.PAUSED


async def test_over_budget_is_a_failure_that_is_not_retried(stage: Stage) -> None:
    """Proves C6."""
    job = await stage.submit(budget={"tokens": 10}, max_attempts=5)
    (lease,) = await stage.claim()
    assert lease.policy.budget == {"tokens": 10}
    await stage.finish(lease, Outcome.failed("budget_exceeded", "used 12 of 10 tokens", cause=Cause.CANCELLED))
    record = await stage.get(job)
    assert (record.status, record.error and record.error.code) == (Status.FAILED, "budget_exceeded")
    resumed = await stage.store.jobs.resume(job.id, budget={"tokens": 20})
    assert resumed.policy.budget == {"tokens": 20}
    (lease,) = await stage.claim()
    assert lease.policy.budget == {"tokens": 20}


async def test_resume_allows_one_more_attempt_and_clears_the_end(stage: Stage) -> None:
    """Proves C8."""
    job = await in_status(stage, Status.FAILED)
    resumed = await stage.store.jobs.resume(job.id, by="ada", reason="disk is back")
    assert (resumed.status, resumed.finished_at, resumed.max_attempts) == (Status.QUEUED, None, 2)
    assert resumed.error == Error(code="exit_nonzero", message="boom")  # of the last attempt, until the next one ends
    assert resumed.started_at == job.started_at
    audit = [event.data for event in await stage.events(job) if event.type == "audit"]
    assert audit == [{"action": "resume", "by": "ada", "reason": "disk is back"}]
    await stage.run_one()
    record = await stage.get(job)
    assert (record.status, record.error, record.attempts) == (Status.SUCCEEDED, None, 2)


async def test_resolve_ends_a_failed_job_with_a_person_s_result(stage: Stage) -> None:
    """Proves C8."""
    job = await in_status(stage, Status.FAILED)
    resolved = await stage.store.jobs.resolve(job.id, {"ok": 1}, by="ada", reason="done by hand")
    assert (resolved.status, resolved.result, resolved.error) == (Status.SUCCEEDED, {"ok": 1}, None)


async def test_resume_of_an_attempt_that_may_still_run_needs_a_person_s_word(stage: Stage) -> None:
    """Proves C8."""
    job = await stage.submit(**PROCESS)
    await stage.claim_process()
    for _ in range(5):
        await stage.advance(3600)
        await stage.store.leases.reap()
        await stage.advance(3600)
        await stage.adopt()
    await stage.advance(3600)
    await stage.store.leases.reap()
    assert await stage.store.leases.abandon() == 1
    with pytest.raises(Conflict, match=r"attempt 1 may still run in host-a; .*stopped=true"):
        await stage.store.jobs.resume(job.id)
    await stage.store.jobs.resume(job.id, stopped=True)
    (attempt,) = await stage.store.attempts.list(job.id)
    assert (attempt.attempt, attempt.cause) == (1, Cause.LOST)
    (lease,) = await stage.claim_process()
    assert lease.attempt == 2


async def test_queue_timeout_ends_a_job_that_nobody_claims(stage: Stage) -> None:
    job = await stage.submit(queue_timeout=60, available_at=stage.later(30).isoformat())
    claimed = await stage.submit(queue_timeout=60, spec={"name": "g"})
    await stage.claim(name="g")
    await stage.advance(89)
    assert await stage.store.jobs.expire() == 0
    await stage.advance(2)
    assert await stage.store.jobs.expire() == 1
    record = await stage.get(job)
    assert (record.status, record.error and record.error.code) == (Status.TIMED_OUT, "queue_timeout")
    assert await stage.status(claimed) is Status.RUNNING


async def test_delete_refuses_what_is_active_unless_forced(stage: Stage) -> None:
    jobs = stage.store.jobs
    for status in (Status.PENDING, Status.QUEUED, Status.RUNNING, Status.PAUSED):
        job = await in_status(stage, status)
        with pytest.raises(Conflict, match=f"blocked: job {job.id} is {status}"):
            await jobs.delete(job.id)
        assert (await jobs.delete(job.id, force=True, dry_run=True)).outcome == "would_delete"
        assert await stage.status(job) is status
        outcome = (await jobs.delete(job.id, force=True)).outcome
        assert outcome == ("deleting" if status is Status.RUNNING else "deleted")
    for status in (Status.SUCCEEDED, Status.FAILED, Status.TIMED_OUT, Status.CANCELLED):
        job = await in_status(stage, status)
        assert (await jobs.delete(job.id, dry_run=True)).outcome == "would_delete"
        assert (await jobs.delete(job.id)).outcome == "deleted"
        with pytest.raises(NotFound):
            await stage.get(job)
        with pytest.raises(NotFound):
            await stage.events(job)


async def test_forced_delete_that_a_duty_finishes_first_says_deleted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that asked to delete a job is not told that there is none."""
    job = await stage.submit()
    jobs, get = stage.store.jobs, stage.store.jobs.get
    looks = 0

    async def after_the_duty(job_id: str, *, tenant: str = "default") -> Job:
        nonlocal looks
        looks += 1
        if looks > 1:
            await jobs.purge()
        return await get(job_id, tenant=tenant)

    monkeypatch.setattr(jobs, "get", after_the_duty)
    assert (await jobs.delete(job.id, force=True)).outcome == "deleted"
    assert looks > 1


@pytest.mark.parametrize("status", [Status.SUCCEEDED, Status.CANCELLED])
async def test_forced_delete_of_a_running_job_is_finished_by_the_duty(stage: Stage, status: Status) -> None:
    job = await stage.submit(lane="L")
    (lease,) = await stage.claim()
    assert (await stage.store.jobs.delete(job.id, force=True)).outcome == "deleting"
    assert await stage.store.jobs.purge() == 0
    await stage.finish(lease, Outcome(status=status, cause=Cause.CANCELLED))
    assert await stage.store.jobs.purge() == 1
    with pytest.raises(NotFound):
        await stage.get(job)


async def paused_and_doomed(stage: Stage) -> Job:
    """A job that was to be deleted while it ran, and ended paused."""
    job = await stage.submit()
    (lease,) = await stage.claim(slots=1)
    assert (await stage.store.jobs.delete(job.id, force=True)).outcome == "deleting"
    await stage.finish(lease, Outcome(status=Status.PAUSED, cause=Cause.INTERRUPTED))
    return job


@pytest.mark.parametrize("verb", ["resolve", "cancel"])
async def test_accepted_delete_is_carried_through_every_other_move(stage: Stage, verb: str) -> None:
    """Proves C1."""
    job = await paused_and_doomed(stage)
    await getattr(stage.store.jobs, verb)(job.id)
    assert await stage.store.jobs.purge() == 1


async def test_purge_of_a_paused_job_tells_its_dependants(stage: Stage) -> None:
    """Proves N8."""
    job = await paused_and_doomed(stage)
    child = await stage.submit(needs=[job.id])
    assert await stage.store.jobs.purge() == 1
    assert await stage.status(child) is Status.FAILED


async def test_dismiss_keeps_a_partial_result(stage: Stage) -> None:
    """Proves C8."""
    job = await stage.submit()
    (lease,) = await stage.claim()
    error = Error(code="exit_nonzero", message="boom")
    await stage.finish(lease, Outcome(status=Status.FAILED, error=error, result={"partial": True}))
    dismissed = await stage.store.jobs.dismiss(job.id)
    assert (dismissed.result, dismissed.error) == ({"partial": True}, error)


async def test_list_filters_by_every_field(stage: Stage) -> None:
    """Proves J14."""
    one = await stage.submit(kind="build", labels={"team": "blue", "env": "prod"}, queue="a", lane="L1")
    await stage.advance(10)
    two = await stage.submit(kind="run", labels={"team": "blue"}, queue="b", hold=True)
    await stage.advance(10)
    three = await stage.submit(kind="run", labels={"team": "red"}, queue="a", lane="L2")
    mine = stage.store.jobs

    async def ids(**filters: Any) -> list[str]:
        return [job.id for job in (await mine.list(**filters)).items]

    assert await ids() == [three.id, two.id, one.id]
    assert await ids(kind="run") == [three.id, two.id]
    assert await ids(queue="a") == [three.id, one.id]
    assert await ids(lane="L2") == [three.id]
    assert await ids(status=[Status.PENDING]) == [two.id]
    assert await ids(status=[Status.PENDING, Status.QUEUED]) == [three.id, two.id, one.id]
    assert await ids(labels={"team": "blue"}) == [two.id, one.id]
    assert await ids(labels={"team": "blue", "env": "prod"}) == [one.id]
    assert await ids(labels={"nobody": "x"}) == []
    assert await ids(since=START + timedelta(seconds=10)) == [three.id, two.id]
    assert await ids(until=START + timedelta(seconds=10)) == [one.id]
    assert await ids(tenant="someone") == []


async def test_cursor_neither_skips_nor_repeats_while_jobs_change(stage: Stage) -> None:
    """Proves J14."""
    ids: set[str] = set()
    for _ in range(25):
        ids |= set(await stage.store.jobs.submit_many([{"runner": "function", "spec": {"name": "f"}}] * 100))
        await stage.advance(1)
    seen: list[str] = []
    cursor = None
    while True:
        page = await stage.store.jobs.list(limit=97, cursor=cursor)
        seen += [job.id for job in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
        await stage.submit()  # newer than all pages
        (lease,) = await stage.claim(slots=1)
        await stage.finish(lease)
    assert len(seen) == len(set(seen)) == 2_500
    assert set(seen) == ids


@pytest.mark.parametrize(
    ("filters", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"cursor": "nonsense"}, "cursor"),
        ({"cursor": "MTIzLmFiYw=="}, "cursor"),
        ({"since": START.replace(tzinfo=None)}, "since"),
    ],
)
async def test_list_names_the_bad_filter(stage: Stage, filters: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        await stage.store.jobs.list(**filters)
    assert caught.value.field == field


async def test_foreign_and_unknown_ids_are_not_found(stage: Stage) -> None:
    job = await stage.submit(tenant="someone")
    jobs = stage.store.jobs
    for job_id in (job.id, new_id(), "nonsense"):
        for call in (jobs.get, jobs.release, jobs.cancel, jobs.interrupt, jobs.resume, jobs.resolve, jobs.dismiss):
            with pytest.raises(NotFound):
                await call(job_id)
        with pytest.raises(NotFound):
            await jobs.delete(job_id, force=True)
        for reader in (stage.store.events.page, stage.store.attempts.list):
            with pytest.raises(NotFound):
                await reader(job_id)
    assert (await jobs.get(job.id, tenant="someone")).status is Status.QUEUED


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"colour": "red"}, "colour"),
        ({"priority": "high"}, "priority"),
        ({"priority": 10**9}, "priority"),
        ({"queue": ""}, "queue"),
        ({"queue": "a\nb"}, "queue"),
        ({"kind": "x" * 201}, "kind"),
        ({"labels": {"a": 1}}, "labels[...]"),
        ({"runner": "magic"}, "runner"),
        ({"spec": {"name": "f", "extra": 1}}, "spec.extra"),
        ({"spec": {}}, "spec.name"),
        ({"runner": "process", "spec": {"command": []}}, "spec.command"),
        ({"runner": "process", "spec": {"command": "ls"}}, "spec.command"),
        ({"runner": "docker", "spec": {"image": "x", "memory": "much"}}, "spec.memory"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"on_lost": "panic"}, "on_lost"),
        ({"retry": {"on": ["lost"]}}, "retry.on[0]"),
        ({"retry": {"base": 9, "cap": 1}}, "retry"),
        ({"retry": {"colour": 1}}, "retry.colour"),
        ({"available_at": "2026-01-17T09:00:00"}, "available_at"),
        ({"needs": ["nonsense"]}, "needs[0]"),
        ({"id": "nonsense"}, "id"),
        ({"inputs": {"a": "\0"}}, "inputs"),
        ({"inputs": {"a": "\ud800"}}, "inputs"),
        ({"inputs": {"a": "x" * 1024 * 1025}}, "inputs"),
        ({"inputs": [1]}, "inputs"),
        ({"budget": {"tokens": -1}}, "budget[...]"),
    ],
)
async def test_bad_submission_names_its_field_and_leaves_nothing(
    stage: Stage, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(Invalid) as caught:
        await stage.submit(**fields)
    assert caught.value.field == field
    assert (await stage.store.jobs.list()).items == []


async def test_bad_tenant_is_refused(stage: Stage) -> None:
    for tenant in ("", "a\nb", "x" * 201):
        with pytest.raises(Invalid, match="tenant"):
            await stage.submit(tenant=tenant)


async def test_resume_with_a_failed_need_names_it(stage: Stage) -> None:
    """Proves C8."""
    parent = await stage.submit()
    child = await stage.submit(needs=[parent.id])
    (lease,) = await stage.claim()
    await stage.fail(lease)
    with pytest.raises(NeedFailed, match=parent.id):
        await stage.store.jobs.resume(child.id)


async def test_stop_ladder_is_written_step_by_step(stage: Stage) -> None:
    """Proves C1."""
    job = await stage.submit()
    (lease,) = await stage.claim()
    assert not await stage.store.leases.advance_stop(lease, StopPhase.SIGNALLED)  # nobody asked
    await stage.store.jobs.cancel(job.id)
    for phase in (StopPhase.SIGNALLED, StopPhase.KILLED, StopPhase.DEAD):
        assert await stage.store.leases.advance_stop(lease, phase, grace=2)
    await stage.finish(
        lease, Outcome(status=Status.CANCELLED, cause=Cause.CANCELLED, error=Error(code="cancelled", message="by ada"))
    )
    steps = [event.data["cancel"] for event in await stage.events(job) if event.type == "cancel"]
    assert steps == ["requested", "signalled", "killed", "dead"]


async def test_closed_store_says_so(stage: Stage) -> None:
    store = Store(await connect(stage.url, listen=False, clock=stage.clock))
    await store.close()
    with pytest.raises(HoldfastError):
        await store.jobs.list()


async def test_needs_are_checked_in_a_call_with_a_key_but_not_when_it_is_replayed(stage: Stage) -> None:
    """Proves J12."""
    job = {"runner": "function", "spec": {"name": "f"}}
    with pytest.raises(NotFound, match="named in needs"):
        await stage.store.jobs.accept([{**job, "needs": [new_id()]}], key="K")
    parent = await stage.submit()
    child = {**job, "needs": [parent.id]}
    (first,) = await stage.store.jobs.accept([child], key="K")
    await stage.store.jobs.cancel(parent.id)
    with pytest.raises(NeedFailed, match=parent.id):
        await stage.store.jobs.accept([child], key="other")
    (again,) = await stage.store.jobs.accept([child], key="K")
    assert (again.id, again.reused) == (first.id, True)
