"""Reuse keys and idempotency keys: the same work once, the same call once."""

import asyncio

import pytest

from holdfast.errors import Conflict, Invalid, NotFound, ReplayedJobDeleted
from holdfast.model import Job, Status
from holdfast.store.retention import Retention
from holdfast.submission import build_batch
from tests.support.store_harness import StoreHarness

JOB = {"runner": "function", "spec": {"name": "f"}}
DAY = 24 * 3600.0


async def test_one_live_job_per_key_is_joined(harness: StoreHarness) -> None:
    """Proves N7."""
    first = await harness.submit(reuse_key="thumb")
    again = await harness.submit(reuse_key="thumb")
    other = await harness.submit(reuse_key="thumb", tenant="other")
    assert (first.reused, again.reused, again.id) == (False, True, first.id)
    assert (other.reused, other.id != first.id) == (False, True)
    (lease, _) = await harness.claim()
    assert (await harness.submit(reuse_key="thumb")).id == lease.id == first.id


async def test_succeeded_is_returned_unless_a_rebuild_is_asked_for(harness: StoreHarness) -> None:
    """Proves N7."""
    first = await harness.submit(reuse_key="thumb")
    await harness.run_one()
    again = await harness.submit(reuse_key="thumb")
    assert (again.id, again.reused, again.status) == (first.id, True, Status.SUCCEEDED)
    rebuilt = await harness.submit(reuse_key="thumb", rebuild=True)
    assert (rebuilt.id != first.id, rebuilt.reused) == (True, False)
    joined = await harness.submit(reuse_key="thumb", rebuild=True)
    assert (joined.id, joined.reused) == (rebuilt.id, True)


@pytest.mark.parametrize("end", ["failed", "cancelled", "deleted"])
async def test_failed_or_deleted_build_is_rebuilt(harness: StoreHarness, end: str) -> None:
    """Proves N7."""
    first = await harness.submit(reuse_key="thumb")
    if end == "failed":
        (lease,) = await harness.claim()
        await harness.fail(lease)
    else:
        await harness.store.jobs.cancel(first.id)
    if end == "deleted":
        await harness.store.jobs.delete(first.id)
    again = await harness.submit(reuse_key="thumb")
    assert (again.reused, again.id != first.id) == (False, True)


async def test_resume_of_an_old_one_while_another_lives_names_it(harness: StoreHarness) -> None:
    """Proves N7."""
    old = await harness.submit(reuse_key="thumb")
    (lease,) = await harness.claim()
    await harness.fail(lease)
    new = await harness.submit(reuse_key="thumb")
    before = await harness.get(old)
    with pytest.raises(Conflict, match=f"cannot resume job {old.id}: job {new.id} is live for its reuse key"):
        await harness.store.jobs.resume(old.id)
    assert await harness.get(old) == before
    (lease,) = await harness.claim()
    await harness.fail(lease)
    assert (await harness.store.jobs.resume(old.id)).status is Status.QUEUED
    assert (await harness.submit(reuse_key="thumb")).id == old.id


async def old_and_good(harness: StoreHarness) -> tuple[Job, Job]:
    """A build that failed, and a newer one of the same key that succeeded."""
    old = await harness.submit(reuse_key="thumb")
    (lease,) = await harness.claim()
    await harness.fail(lease)
    good = await harness.submit(reuse_key="thumb")
    await harness.run_one()
    return old, good


async def test_resumed_old_build_that_fails_again_leaves_the_key_to_the_good_one(harness: StoreHarness) -> None:
    """Proves D6."""
    old, good = await old_and_good(harness)
    await harness.store.jobs.resume(old.id)
    meanwhile = await harness.submit(reuse_key="thumb")
    assert (meanwhile.id, meanwhile.reused) == (good.id, True)
    (lease,) = await harness.claim()
    assert lease.id == old.id
    await harness.fail(lease)
    again = await harness.submit(reuse_key="thumb")
    assert (again.id, again.reused, again.status) == (good.id, True, Status.SUCCEEDED)


async def test_resumed_old_build_that_succeeds_is_the_newest_and_is_returned(harness: StoreHarness) -> None:
    """Proves D6."""
    old, good = await old_and_good(harness)
    await harness.store.jobs.resume(old.id)
    await harness.run_one()
    assert (await harness.submit(reuse_key="thumb")).id == old.id
    await harness.store.jobs.delete(old.id)
    assert (await harness.submit(reuse_key="thumb")).id == good.id


async def test_resolved_old_build_is_returned_only_while_it_stands_for_the_key(harness: StoreHarness) -> None:
    """Proves D6."""
    old, good = await old_and_good(harness)
    await harness.store.jobs.resolve(old.id, {"by": "hand"})
    assert (await harness.submit(reuse_key="thumb")).id == good.id


async def test_rebuild_joins_the_resumed_build_and_replaces_both_once_it_has_failed(harness: StoreHarness) -> None:
    """Proves D6, N7."""
    old, good = await old_and_good(harness)
    await harness.store.jobs.resume(old.id)
    joined = await harness.submit(reuse_key="thumb", rebuild=True)
    assert (joined.id, joined.reused) == (old.id, True)
    (lease,) = await harness.claim()
    await harness.fail(lease)
    rebuilt = await harness.submit(reuse_key="thumb", rebuild=True)
    assert (rebuilt.id in (old.id, good.id), rebuilt.reused) == (False, False)
    with pytest.raises(Conflict, match=f"job {rebuilt.id} is live for its reuse key"):
        await harness.store.jobs.resume(old.id)


async def test_several_old_builds_may_be_resumed_in_turn(harness: StoreHarness) -> None:
    """Proves D6."""
    oldest = await harness.submit(reuse_key="thumb")
    (lease,) = await harness.claim()
    await harness.fail(lease)
    old, good = await old_and_good(harness)
    for job in (old, oldest, old):
        await harness.store.jobs.resume(job.id)
        other = oldest if job is old else old
        with pytest.raises(Conflict, match=f"job {job.id} is live for its reuse key"):
            await harness.store.jobs.resume(other.id)
        (lease,) = await harness.claim()
        await harness.fail(lease)
        assert (await harness.submit(reuse_key="thumb")).id == good.id


@pytest.mark.parametrize("how", ["delete", "prune"])
@pytest.mark.parametrize("gone", ["good", "old", "both"])
async def test_key_falls_back_to_the_remaining_build(harness: StoreHarness, how: str, gone: str) -> None:
    """Proves D6."""
    old, good = await old_and_good(harness)
    await harness.store.jobs.resume(old.id)
    (lease,) = await harness.claim()
    await harness.fail(lease)
    if how == "delete":
        for job in {"good": [good], "old": [old], "both": [good, old]}[gone]:
            await harness.store.jobs.delete(job.id)
    else:
        statuses = {"good": [Status.SUCCEEDED], "old": [Status.FAILED], "both": [Status.SUCCEEDED, Status.FAILED]}
        await harness.advance(2 * DAY)
        await harness.store.pruning.prune(Retention(ages=dict.fromkeys(statuses[gone], DAY)))
    again = await harness.submit(reuse_key="thumb")
    assert (again.reused, again.id == good.id) == ((True, True) if gone == "old" else (False, False))
    joined = await harness.submit(reuse_key="thumb")
    assert joined.id == again.id


async def test_good_build_deleted_during_a_resume_leaves_one_live_build(harness: StoreHarness) -> None:
    """Proves D6, N7."""
    old, good = await old_and_good(harness)
    await harness.store.jobs.resume(old.id)
    await harness.store.jobs.delete(good.id)
    joined = await harness.submit(reuse_key="thumb")
    assert (joined.id, joined.reused) == (old.id, True)


async def test_revived_dependant_leaves_the_key_to_the_good_one(harness: StoreHarness) -> None:
    """Proves D6, C8."""
    parent = await harness.submit()
    keyed = await harness.submit(needs=[parent.id], reuse_key="thumb")
    (lease,) = await harness.claim()
    await harness.fail(lease)
    good = await harness.submit(reuse_key="thumb")
    await harness.run_one()
    await harness.store.jobs.resume(parent.id)
    assert await harness.status(keyed) is Status.QUEUED
    assert (await harness.submit(reuse_key="thumb")).id == good.id
    await harness.run_one()
    (lease,) = await harness.claim()
    assert lease.id == keyed.id
    await harness.fail(lease)
    assert (await harness.submit(reuse_key="thumb")).id == good.id


async def test_dependant_replaced_by_a_live_job_stays_failed_and_an_event_says_so(harness: StoreHarness) -> None:
    """Proves N7, C8."""
    parent = await harness.submit()
    keyed = await harness.submit(needs=[parent.id], reuse_key="thumb")
    plain = await harness.submit(needs=[parent.id])
    (lease,) = await harness.claim()
    await harness.fail(lease)
    assert await harness.status(keyed) is Status.FAILED
    live = await harness.submit(reuse_key="thumb")
    await harness.store.jobs.resume(parent.id)
    assert (await harness.status(keyed), await harness.status(plain)) == (Status.FAILED, Status.QUEUED)
    last = (await harness.events(keyed))[-1]
    assert (last.type, last.data["live"]) == ("audit", live.id)
    assert last.seq == (await harness.get(keyed)).last_seq


async def test_a_batch_joins_its_own_keys_and_needs_follow(harness: StoreHarness) -> None:
    """Proves N7."""
    known = await harness.submit(reuse_key="base")
    ids = ["0197aaaa-0000-7000-8000-000000000001", "0197aaaa-0000-7000-8000-000000000002"]
    batch = [
        {**JOB, "id": ids[0], "reuse_key": "base"},
        {**JOB, "id": ids[1], "reuse_key": "next", "needs": [ids[0]]},
        {**JOB, "reuse_key": "next"},
    ]
    accepted = await harness.store.jobs.accept(batch)
    assert [(one.id, one.reused) for one in accepted] == [(known.id, True), (ids[1], False), (ids[1], True)]
    assert [lease.id for lease in await harness.claim()] == [known.id]
    await harness.store.jobs.cancel(ids[1])


async def test_ten_parallel_submits_make_one_build(harness: StoreHarness) -> None:
    """Proves N7."""
    jobs = await asyncio.gather(*(harness.submit(reuse_key="thumb") for _ in range(10)))
    assert len({job.id for job in jobs}) == 1
    assert sorted(job.reused for job in jobs) == [False] + [True] * 9


async def test_same_call_with_the_same_key_answers_the_same(harness: StoreHarness) -> None:
    """Proves J12."""
    first = await harness.store.jobs.submit_many([JOB, {**JOB, "kind": "two"}], key="call-1")
    again = await harness.store.jobs.accept([JOB, {**JOB, "kind": "two"}], key="call-1")
    assert [one.id for one in again] == list(first)
    assert all(one.reused for one in again)
    other_tenant = await harness.store.jobs.submit_many([JOB, {**JOB, "kind": "two"}], key="call-1", tenant="other")
    assert set(other_tenant).isdisjoint(first)
    assert len((await harness.store.jobs.list()).items) == 2


async def test_same_key_with_another_body_is_a_conflict(harness: StoreHarness) -> None:
    """Proves J12."""
    await harness.store.jobs.submit(JOB, key="call-1")
    with pytest.raises(Conflict, match="idempotency key call-1 was used with another body"):
        await harness.store.jobs.submit({**JOB, "priority": 1}, key="call-1")
    with pytest.raises(Conflict):
        await harness.store.jobs.submit_many([JOB, JOB], key="call-1")
    assert len((await harness.store.jobs.list()).items) == 1


async def test_key_lives_for_a_day_and_longer_than_its_job(harness: StoreHarness) -> None:
    """Proves J12."""
    job = await harness.store.jobs.submit(JOB, key="call-1")
    await harness.store.jobs.delete(job.id, force=True)
    with pytest.raises(NotFound):
        await harness.get(job)
    with pytest.raises(ReplayedJobDeleted, match="what idempotency key call-1 made was deleted"):
        await harness.store.jobs.submit(JOB, key="call-1")
    await harness.advance(24 * 3600 - 1)
    with pytest.raises(ReplayedJobDeleted):
        await harness.store.jobs.submit(JOB, key="call-1")
    assert await harness.store.pruning.prune_keys() == 0
    await harness.advance(2)
    again = await harness.store.jobs.submit(JOB, key="call-1")
    assert again.id != job.id
    await harness.advance(24 * 3600 + 1)
    assert await harness.store.pruning.prune_keys() == 1


@pytest.mark.parametrize("key", ["", "x" * 129, "a\nb"])
async def test_bad_keys_are_refused(harness: StoreHarness, key: str) -> None:
    """Proves J12."""
    with pytest.raises(Invalid, match="idempotency_key"):
        await harness.store.jobs.submit(JOB, key=key)
    assert (await harness.store.jobs.list()).items == []


async def test_refused_call_does_not_use_its_key_up(harness: StoreHarness) -> None:
    """Proves J12."""
    await harness.store.queues.limit("default", depth=1)
    await harness.submit()
    with pytest.raises(Exception, match="full"):
        await harness.store.jobs.submit(JOB, key="call-1")
    await harness.store.queues.limit("default")
    job = await harness.store.jobs.submit(JOB, key="call-1")
    assert not job.reused


async def test_ten_parallel_calls_with_one_key_make_one_job(harness: StoreHarness) -> None:
    """Proves J12."""
    jobs = await asyncio.gather(*(harness.store.jobs.submit(JOB, key="call-1") for _ in range(10)))
    assert len({job.id for job in jobs}) == 1
    assert len((await harness.store.jobs.list()).items) == 1


async def test_two_dependants_of_one_key_are_not_both_revived(harness: StoreHarness) -> None:
    """Proves N7."""
    p, q = await harness.submit(), await harness.submit()
    first = await harness.submit(needs=[p.id, q.id], reuse_key="k")
    leases = {lease.id: lease for lease in await harness.claim()}
    await harness.fail(leases[p.id])
    second = await harness.submit(needs=[q.id], reuse_key="k")
    assert not second.reused
    await harness.fail(leases[q.id])
    await harness.store.jobs.resume(p.id)
    await harness.store.jobs.resume(q.id)
    statuses = [await harness.status(job) for job in (first, second)]
    assert sorted(statuses) == [Status.FAILED, Status.QUEUED]


async def test_settling_without_a_revival_leaves_the_key(harness: StoreHarness) -> None:
    """Proves N7."""
    p, q = await harness.submit(), await harness.submit()
    broken = await harness.submit(needs=[p.id, q.id], reuse_key="k")
    leases = {lease.id: lease for lease in await harness.claim()}
    await harness.fail(leases[p.id])
    built = await harness.submit(reuse_key="k")
    await harness.run_one()
    events = await harness.events(broken)
    await harness.finish(leases[q.id])
    again = await harness.submit(reuse_key="k")
    assert (again.id, again.reused) == (built.id, True)
    assert await harness.events(broken) == events


async def test_repeat_of_a_call_answers_in_its_own_order(harness: StoreHarness) -> None:
    """Proves J12."""
    ids = ["0197aaaa-0000-7000-8000-00000000000a", "0197aaaa-0000-7000-8000-00000000000b"]
    call = [{**JOB, "id": ids[1], "needs": [ids[0]]}, {**JOB, "id": ids[0]}]
    assert list(await harness.store.jobs.submit_many(call, key="call-1")) == [ids[1], ids[0]]
    assert list(await harness.store.jobs.submit_many(call, key="call-1")) == [ids[1], ids[0]]


async def test_need_that_succeeded_may_be_removed_before_the_dependant_is_resolved(harness: StoreHarness) -> None:
    """Proves N6."""
    parent = await harness.submit()
    await harness.run_one()
    batch = build_batch([{**JOB, "needs": [parent.id]}], "default", None)
    await harness.store.database.submit(batch)  # accepted, and nobody has looked at its needs yet
    await harness.store.jobs.delete(parent.id)
    await harness.store.gates.resolve()
    assert [lease.id for lease in await harness.claim()] == list(batch.ids)
