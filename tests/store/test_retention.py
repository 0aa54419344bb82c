"""Retention: ages per status, the newest of a signature, and what is never removed."""

import pytest

from holdfast.duties.pruner import Pruner
from holdfast.errors import Invalid
from holdfast.model import Cause, Error, Outcome, Status
from holdfast.store.retention import Retention
from tests.support.store_fixture import Stage

DAY = 86_400.0
INTERRUPTED = Outcome(
    status=Status.PAUSED, cause=Cause.INTERRUPTED, error=Error(code="interrupted", message="by request")
)
WEEK = Retention(ages={Status.SUCCEEDED: 7 * DAY, Status.FAILED: 30 * DAY})


async def left(stage: Stage) -> set[str]:
    return {job.id for job in (await stage.store.jobs.list(limit=1000)).items}


async def prune(stage: Stage, retention: Retention, scan: int = 3) -> list[str]:
    removed: list[str] = []
    after: str | None = None
    while True:
        step = await stage.store.retain.prune(retention, after=after, scan=scan)
        removed += step.removed
        if step.next_after is None:
            return removed
        after = step.next_after


async def test_jobs_go_when_the_age_of_their_status_is_over(stage: Stage) -> None:
    """Proves J16."""
    done = await stage.submit()
    await stage.run_one()
    bad = await stage.submit()
    (lease,) = await stage.claim()
    await stage.fail(lease)
    cancelled = await stage.submit()
    await stage.store.jobs.cancel(cancelled.id)
    await stage.advance(7 * DAY - 1)
    assert await prune(stage, WEEK) == []
    await stage.advance(1)
    assert await prune(stage, WEEK) == [done.id]
    await stage.advance(30 * DAY)
    assert await prune(stage, WEEK) == [bad.id]
    assert await left(stage) == {cancelled.id}


async def test_nothing_of_a_removed_job_stays_behind(stage: Stage) -> None:
    """Proves J16."""
    job = await stage.submit(reuse_key="thumb")
    await stage.run_one()
    await stage.advance(8 * DAY)
    assert await prune(stage, WEEK) == [job.id]
    fresh = await stage.submit(id=job.id, reuse_key="thumb")
    assert not fresh.reused
    assert [event.seq for event in await stage.events(fresh)] == [1]
    assert await stage.store.attempts.list(job.id) == []


async def test_newest_of_each_signature_stay(stage: Stage) -> None:
    """Proves J16."""
    same = []
    for _ in range(5):
        same.append(await stage.submit(inputs={"a": 1}))
        await stage.run_one()
        await stage.advance(1)
    other = await stage.submit(inputs={"a": 2})
    await stage.run_one()
    foreign = await stage.submit(inputs={"a": 1}, tenant="other")
    await stage.run_one()
    await stage.advance(61)
    removed = [*await prune(stage, Retention(newest=2)), *await prune(stage, Retention(newest=2))]
    assert sorted(removed) == sorted(job.id for job in same[:3])
    assert await prune(stage, Retention(newest=2)) == []
    assert await left(stage) == {same[3].id, same[4].id, other.id}
    assert (await stage.store.jobs.get(foreign.id, tenant="other")).status is Status.SUCCEEDED


async def test_active_referenced_blocking_and_just_built_jobs_stay(stage: Stage) -> None:
    """Proves J16."""
    waiting = await stage.submit(queue="other")
    running = await stage.submit()
    (lease,) = await stage.claim()
    assert lease.id == running.id
    blocker = await stage.submit(lane="L")
    (lease,) = await stage.claim()
    await stage.fail(lease)
    parent = await stage.submit()
    needing = await stage.submit(needs=[parent.id, waiting.id])
    (lease,) = await stage.claim()
    await stage.finish(lease)
    paused = await stage.submit(lane="P")
    (lease,) = await stage.claim()
    await stage.store.jobs.interrupt(paused.id)
    await stage.finish(lease, INTERRUPTED)
    await stage.advance(365 * DAY)
    fresh = await stage.submit()
    await stage.run_one()
    everything = Retention(ages=dict.fromkeys([s for s in Status if s.terminal], 0.0), newest=1)
    assert set(await prune(stage, everything)) == {parent.id}
    assert await left(stage) == {waiting.id, running.id, blocker.id, needing.id, paused.id, fresh.id}
    await stage.store.jobs.dismiss(blocker.id)
    assert await prune(stage, everything) == [blocker.id]


async def test_parent_of_a_waiting_job_stays_until_its_needs_are_ticked_off(stage: Stage) -> None:
    """Proves J16."""
    parent = await stage.submit()
    other = await stage.submit(queue="other")
    child = await stage.submit(needs=[parent.id, other.id])
    await stage.run_one()
    await stage.advance(8 * DAY)
    await prune(stage, WEEK)
    (lease,) = await stage.claim(queue="other")
    await stage.finish(lease)
    assert [lease.id for lease in await stage.claim()] == [child.id]


async def test_pruner_goes_along_all_jobs_in_bounded_steps(stage: Stage) -> None:
    """Proves J16."""
    for _ in range(7):
        await stage.submit()
        await stage.run_one()
    await stage.advance(8 * DAY)
    pruner = Pruner(stage.store, WEEK)
    removed = [await pruner.run_once() for _ in range(2)]
    assert removed == [7, 0]
    assert await left(stage) == set()


@pytest.mark.parametrize(
    "bad", [{"ages": {Status.RUNNING: 1.0}}, {"ages": {Status.FAILED: -1.0}}, {"newest": 0}], ids=str
)
def test_retention_that_cannot_be_meant_is_refused(bad: dict[str, object]) -> None:
    """Proves J16."""
    with pytest.raises(Invalid):
        Retention(**bad)  # type: ignore[arg-type]


async def test_counts_come_from_small_indexes(stage: Stage) -> None:
    first = await stage.submit()
    await stage.submit(needs=[first.id])
    await stage.submit(hold=True)
    await stage.submit(available_at=stage.later(60).isoformat())
    await stage.submit(lane="L")
    await stage.submit(lane="L")
    await stage.claim(1)
    counts = await stage.store.retain.counts()
    found = {name: getattr(counts, name) for name in counts.__struct_fields__ if name != "total"}
    assert found == {"open": 1, "future": 1, "needs": 1, "lane": 1, "held": 1, "unresolved": 0, "running": 1}
