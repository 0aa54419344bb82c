"""Submit and read: what is accepted, what is refused and why, and that a call is done whole."""

import json
from typing import Any

import pytest

from holdfast.errors import Conflict, Invalid, NeedFailed, NotFound
from holdfast.model import Gate, Status, new_id
from holdfast.store import open_store
from holdfast.submission import Submission, fingerprint, parse
from tests.support.job_states import PROCESS
from tests.support.store_harness import START, StoreHarness


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
