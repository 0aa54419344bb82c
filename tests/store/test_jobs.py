"""What callers do with jobs: submit, read, list, release, resume, resolve, dismiss."""

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import Conflict, HoldfastError, IllegalMove, Invalid, NeedFailed, NotFound
from holdfast.model import MOVES, Cause, Error, Gate, Job, Lease, Outcome, Status, Verb, new_id
from holdfast.store import open_store
from holdfast.store.store import Store, connect
from holdfast.submission import Submission, fingerprint, parse
from tests.support.store_harness import START, StoreHarness

PROCESS = {"runner": "process", "spec": {"command": ["true"]}}
CALLERS_VERBS = (Verb.RELEASE, Verb.CANCEL, Verb.INTERRUPT, Verb.RESUME, Verb.RESOLVE, Verb.DISMISS)


async def in_status(harness: StoreHarness, status: Status, **fields: Any) -> Job:
    """A job that went to a status on an ordinary way."""
    if status is Status.PENDING:
        return await harness.submit(hold=True, **fields)
    job = await harness.submit(**fields)
    if status is Status.CANCELLED:
        await harness.store.jobs.cancel(job.id)
    elif status is not Status.QUEUED:
        (lease,) = await harness.claim()
        if status is not Status.RUNNING:
            error = None if status is Status.SUCCEEDED else Error(code="exit_nonzero", message="boom")
            await harness.finish(lease, Outcome(status=status, error=error))
    assert await harness.status(job) is status
    return await harness.get(job)


async def last_status_event(harness: StoreHarness, job_id: str) -> str:
    return str([event.data["status"] for event in await harness.events(job_id) if event.type == "status"][-1])


async def test_submitted_job_is_readable_at_once_and_as_it_was_asked(harness: StoreHarness) -> None:
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
    job = await harness.submit(**asked)
    assert job == await harness.get(job.id.upper())
    assert (job.status, job.gate, job.attempts, job.attempt) == (Status.QUEUED, Gate.OPEN, 0, 0)
    assert (job.kind, job.queue, job.priority, job.labels) == ("build", "heavy", 3, {"team": "blue"})
    assert (job.spec, job.inputs) == (asked["spec"], asked["inputs"])
    assert (job.max_attempts, job.policy.timeout, job.policy.stop_after) == (4, 3600, 90)
    assert (job.policy.budget, job.policy.secrets) == ({"tokens": 500000}, ("DB",))
    assert (job.requested_at, job.started_at, job.finished_at) == (START, None, None)


async def test_ids_may_be_given_and_are_never_taken_twice(harness: StoreHarness) -> None:
    given = new_id()
    assert (await harness.submit(id=given)).id == given
    for other in ("default", "someone"):
        with pytest.raises(Conflict, match=given):
            await harness.submit(id=given, tenant=other)
    with pytest.raises(Conflict, match=given):
        await harness.store.jobs.submit_many([{**PROCESS}, {**PROCESS, "id": given}])
    assert len((await harness.store.jobs.list()).items) == 1


async def test_job_is_in_the_database_when_submit_returns(harness: StoreHarness) -> None:
    """Proves J1."""
    async with await open_store(harness.url, listen=False, clock=harness.clock) as other:
        for _ in range(100):
            job = await harness.submit()
            seen = await other.jobs.get(job.id)
            assert (seen.status, seen.gate, seen.attempts, seen.started_at) == (Status.QUEUED, Gate.OPEN, 0, None)


async def test_ten_thousand_jobs_in_one_call(harness: StoreHarness) -> None:
    ids = await harness.store.jobs.submit_many([{**PROCESS, "inputs": {"n": n}} for n in range(10_000)])
    assert len(set(ids)) == 10_000
    assert (await harness.get(ids[-1])).inputs == {"n": 9_999}
    assert len(await harness.claim_process(slots=50)) == 50
    with pytest.raises(Invalid, match="10001 jobs"):
        await harness.store.jobs.submit_many([PROCESS] * 10_001)
    with pytest.raises(Invalid, match="0 jobs"):
        await harness.store.jobs.submit_many([])


async def test_batch_is_all_or_nothing(harness: StoreHarness) -> None:
    with pytest.raises(Invalid, match="command"):
        await harness.store.jobs.submit_many([PROCESS, {"runner": "process", "spec": {}}])
    with pytest.raises(NotFound):
        await harness.store.jobs.submit_many([PROCESS, {**PROCESS, "needs": [new_id()]}])
    assert (await harness.store.jobs.list()).items == []


async def test_held_job_waits_for_its_release(harness: StoreHarness) -> None:
    """Proves J6."""
    job = await harness.submit(hold=True)
    assert (job.status, job.gate) == (Status.PENDING, Gate.HELD)
    assert await harness.claim() == []
    released = await harness.store.jobs.release(job.id, by="ada")
    assert (released.status, released.gate) == (Status.QUEUED, Gate.OPEN)
    assert [event.type for event in await harness.events(job)] == ["status", "audit", "status"]
    assert (await harness.run_one()).id == job.id


async def test_delayed_job_is_claimable_when_due_and_the_next_due_time_is_known(harness: StoreHarness) -> None:
    """Proves J7."""
    assert await harness.store.next_due() is None
    job = await harness.submit(available_at=harness.later(90).isoformat())
    await harness.submit(available_at=harness.later(900).isoformat())
    assert job.gate is Gate.FUTURE
    assert await harness.store.next_due() == 90
    await harness.advance(89.9)
    assert await harness.store.gates.promote() == 0
    assert await harness.claim() == []
    await harness.advance(0.1)
    assert await harness.store.next_due() == 0
    assert await harness.store.gates.promote() == 1
    assert [lease.id for lease in await harness.claim()] == [job.id]


async def test_due_time_in_the_past_means_now(harness: StoreHarness) -> None:
    """Proves J7."""
    job = await harness.submit(available_at=harness.later(-90).isoformat())
    assert (job.gate, job.available_at) == (Gate.OPEN, START)


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


async def test_list_filters_by_every_field(harness: StoreHarness) -> None:
    """Proves J14."""
    one = await harness.submit(kind="build", labels={"team": "blue", "env": "prod"}, queue="a", lane="L1")
    await harness.advance(10)
    two = await harness.submit(kind="run", labels={"team": "blue"}, queue="b", hold=True)
    await harness.advance(10)
    three = await harness.submit(kind="run", labels={"team": "red"}, queue="a", lane="L2")
    mine = harness.store.jobs

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


async def test_cursor_neither_skips_nor_repeats_while_jobs_change(harness: StoreHarness) -> None:
    """Proves J14."""
    ids: set[str] = set()
    for _ in range(25):
        ids |= set(await harness.store.jobs.submit_many([{"runner": "function", "spec": {"name": "f"}}] * 100))
        await harness.advance(1)
    seen: list[str] = []
    cursor = None
    while True:
        page = await harness.store.jobs.list(limit=97, cursor=cursor)
        seen += [job.id for job in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
        await harness.submit()  # newer than all pages
        (lease,) = await harness.claim(slots=1)
        await harness.finish(lease)
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
async def test_list_names_the_bad_filter(harness: StoreHarness, filters: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        await harness.store.jobs.list(**filters)
    assert caught.value.field == field


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
    harness: StoreHarness, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(Invalid) as caught:
        await harness.submit(**fields)
    assert caught.value.field == field
    assert (await harness.store.jobs.list()).items == []


async def test_bad_tenant_is_refused(harness: StoreHarness) -> None:
    for tenant in ("", "a\nb", "x" * 201):
        with pytest.raises(Invalid, match="tenant"):
            await harness.submit(tenant=tenant)


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


async def test_needs_are_checked_in_a_call_with_a_key_but_not_when_it_is_replayed(harness: StoreHarness) -> None:
    """Proves J12."""
    job = {"runner": "function", "spec": {"name": "f"}}
    with pytest.raises(NotFound, match="named in needs"):
        await harness.store.jobs.accept([{**job, "needs": [new_id()]}], key="K")
    parent = await harness.submit()
    child = {**job, "needs": [parent.id]}
    (first,) = await harness.store.jobs.accept([child], key="K")
    await harness.store.jobs.cancel(parent.id)
    with pytest.raises(NeedFailed, match=parent.id):
        await harness.store.jobs.accept([child], key="other")
    (again,) = await harness.store.jobs.accept([child], key="K")
    assert (again.id, again.reused) == (first.id, True)


@pytest.mark.parametrize("written", ["pause", "hold"])
async def test_on_lost_hold_is_read_as_pause(harness: StoreHarness, written: Any) -> None:
    """Jobs of callers and databases from before `pause` keep working. Proves L11."""
    as_json = await harness.submit(**PROCESS, on_lost=written)
    as_struct = await harness.store.jobs.submit(
        Submission(runner="process", spec={"command": ["true"]}, on_lost=written)
    )
    (listed, _) = (await harness.store.jobs.list()).items
    (lease, _) = await harness.claim_process(slots=2)
    shown = [job.policy.on_lost for job in (as_json, as_struct, listed, lease)]
    assert shown == ["pause"] * 4
    assert lease.policy_json is not None
    assert json.loads(lease.policy_json)["on_lost"] == written


async def test_replay_of_a_call_with_on_lost_hold_matches_a_key_that_an_older_version_stored(
    harness: StoreHarness,
) -> None:
    """The hashes are what the version before `pause` made of these bodies. Proves J12, L11."""
    body = {**PROCESS, "on_lost": "hold"}
    assert fingerprint([body]) == "9d4cacee-a800-7540-81a5-c85cd214e2c5"
    assert fingerprint([parse(body)]) == "19eee03c-30db-55f6-cc48-d860afdb000b"
    (first,) = await harness.store.jobs.accept([body], key="K")
    (again,) = await harness.store.jobs.accept([body], key="K")
    assert (again.id, again.reused) == (first.id, True)
    with pytest.raises(Conflict, match="another body"):
        await harness.store.jobs.accept([{**PROCESS, "on_lost": "pause"}], key="K")
