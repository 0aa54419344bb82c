"""Deleting jobs: refused, forced, and finished by a duty."""

from collections.abc import Collection, Sequence

import pytest

from holdfast.errors import Conflict, NotFound, StoreError
from holdfast.model import Cause, Job, Outcome, Status
from tests.support.job_states import in_status
from tests.support.store_harness import StoreHarness


async def test_delete_refuses_what_is_active_unless_forced(harness: StoreHarness) -> None:
    jobs = harness.store.jobs
    for status in (Status.PENDING, Status.QUEUED, Status.RUNNING, Status.PAUSED):
        job = await in_status(harness, status)
        with pytest.raises(Conflict, match=f"blocked: job {job.id} is {status}"):
            await jobs.delete(job.id)
        assert (await jobs.delete(job.id, force=True, dry_run=True)).outcome == "would_delete"
        assert await harness.status(job) is status
        outcome = (await jobs.delete(job.id, force=True)).outcome
        assert outcome == ("deleting" if status is Status.RUNNING else "deleted")
    for status in (Status.SUCCEEDED, Status.FAILED, Status.TIMED_OUT, Status.CANCELLED):
        job = await in_status(harness, status)
        assert (await jobs.delete(job.id, dry_run=True)).outcome == "would_delete"
        assert (await jobs.delete(job.id)).outcome == "deleted"
        with pytest.raises(NotFound):
            await harness.get(job)
        with pytest.raises(NotFound):
            await harness.events(job)


async def test_forced_delete_that_a_duty_finished_answers_deleted(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that asked to delete a job is not told that there is none."""
    job = await harness.submit()
    jobs, get = harness.store.jobs, harness.store.jobs.get
    looks = 0

    async def after_the_duty(job_id: str, *, tenant: str = "default") -> Job:
        nonlocal looks
        looks += 1
        if looks > 1:
            await jobs.finish_deletions()
        return await get(job_id, tenant=tenant)

    monkeypatch.setattr(jobs, "get", after_the_duty)
    assert (await jobs.delete(job.id, force=True)).outcome == "deleted"
    assert looks > 1


@pytest.mark.parametrize("status", [Status.SUCCEEDED, Status.CANCELLED])
async def test_forced_delete_of_a_running_job_is_finished_by_the_duty(harness: StoreHarness, status: Status) -> None:
    job = await harness.submit(lane="L")
    (lease,) = await harness.claim()
    assert (await harness.store.jobs.delete(job.id, force=True)).outcome == "deleting"
    assert await harness.store.jobs.finish_deletions() == 0
    await harness.finish(lease, Outcome(status=status, cause=Cause.CANCELLED))
    assert await harness.store.jobs.finish_deletions() == 1
    with pytest.raises(NotFound):
        await harness.get(job)


async def paused_with_deletion_requested(harness: StoreHarness) -> Job:
    """A job that was to be deleted while it ran, and ended paused."""
    job = await harness.submit()
    (lease,) = await harness.claim(slots=1)
    assert (await harness.store.jobs.delete(job.id, force=True)).outcome == "deleting"
    await harness.finish(lease, Outcome(status=Status.PAUSED, cause=Cause.INTERRUPTED))
    return job


@pytest.mark.parametrize("verb", ["resolve", "cancel"])
async def test_accepted_delete_survives_every_other_move(harness: StoreHarness, verb: str) -> None:
    """Proves C1."""
    job = await paused_with_deletion_requested(harness)
    await getattr(harness.store.jobs, verb)(job.id)
    assert await harness.store.jobs.finish_deletions() == 1


async def test_purge_of_a_paused_job_settles_its_dependants(harness: StoreHarness) -> None:
    """Proves N8."""
    job = await paused_with_deletion_requested(harness)
    child = await harness.submit(needs=[job.id])
    assert await harness.store.jobs.finish_deletions() == 1
    assert await harness.status(child) is Status.FAILED


async def test_duty_removes_no_files_of_a_job_that_still_runs(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await harness.submit()
    (lease,) = await harness.claim()
    jobs, removed = harness.store.jobs, list[str]()
    remove = jobs.files.remove

    async def noting(job_ids: Sequence[str]) -> Collection[str]:
        removed.extend(job_ids)
        return await remove(job_ids)

    assert (await jobs.delete(job.id, force=True)).outcome == "deleting"
    monkeypatch.setattr(jobs.files, "remove", noting)
    assert (await jobs.finish_deletions(), removed) == (0, [])
    await harness.finish(lease, Outcome(status=Status.CANCELLED, cause=Cause.CANCELLED))
    assert (await jobs.finish_deletions(), removed) == (1, [job.id])


async def test_forced_delete_of_a_job_that_is_cancelled_meanwhile_is_finished_by_the_duty(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await harness.submit()

    async def cancelled_after_this_look(*_: object, **__: object) -> Job:
        patch.undo()
        found = await harness.get(job)
        await harness.store.jobs.cancel(job.id)
        patch.setattr(harness.store.jobs, "_request_deletion", dies)
        return found

    async def dies(*_: object, **__: object) -> bool:
        raise StoreError("the process dies here")

    with monkeypatch.context() as patch:
        patch.setattr(harness.store.jobs, "get", cancelled_after_this_look)
        with pytest.raises(StoreError):
            await harness.store.jobs.delete(job.id, force=True)
    assert await harness.store.jobs.finish_deletions() == 1
    with pytest.raises(NotFound):
        await harness.get(job)
