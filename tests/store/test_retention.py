"""Retention: ages per status, the newest of a signature, and what is never removed."""

import pytest

from holdfast.duties.pruner import Pruner
from holdfast.errors import Invalid
from holdfast.model import Cause, Error, Outcome, Status
from holdfast.store.retention import Retention
from tests.support.store_harness import StoreHarness

DAY = 86_400.0
INTERRUPTED = Outcome(
    status=Status.PAUSED, cause=Cause.INTERRUPTED, error=Error(code="interrupted", message="by request")
)
WEEK = Retention(ages={Status.SUCCEEDED: 7 * DAY, Status.FAILED: 30 * DAY})


async def left(harness: StoreHarness) -> set[str]:
    return {job.id for job in (await harness.store.jobs.list(limit=1000)).items}


async def prune(harness: StoreHarness, retention: Retention, scan: int = 3) -> list[str]:
    removed: list[str] = []
    after: str | None = None
    while True:
        step = await harness.store.pruning.prune(retention, after=after, scan=scan)
        removed += step.removed
        if step.next_after is None:
            return removed
        after = step.next_after


async def test_jobs_go_when_the_age_of_their_status_is_over(harness: StoreHarness) -> None:
    """Proves J16."""
    done = await harness.submit()
    await harness.run_one()
    bad = await harness.submit()
    (lease,) = await harness.claim()
    await harness.fail(lease)
    cancelled = await harness.submit()
    await harness.store.jobs.cancel(cancelled.id)
    await harness.advance(7 * DAY - 1)
    assert await prune(harness, WEEK) == []
    await harness.advance(1)
    assert await prune(harness, WEEK) == [done.id]
    await harness.advance(30 * DAY)
    assert await prune(harness, WEEK) == [bad.id]
    assert await left(harness) == {cancelled.id}


async def test_removed_job_leaves_nothing(harness: StoreHarness) -> None:
    """Proves J16."""
    job = await harness.submit(reuse_key="thumb")
    await harness.run_one()
    await harness.advance(8 * DAY)
    assert await prune(harness, WEEK) == [job.id]
    fresh = await harness.submit(id=job.id, reuse_key="thumb")
    assert not fresh.reused
    assert [event.seq for event in await harness.events(fresh)] == [1]
    assert await harness.store.attempts.list(job.id) == []


async def test_newest_of_each_signature_stay(harness: StoreHarness) -> None:
    """Proves J16."""
    same = []
    for _ in range(5):
        same.append(await harness.submit(inputs={"a": 1}))
        await harness.run_one()
        await harness.advance(1)
    other = await harness.submit(inputs={"a": 2})
    await harness.run_one()
    foreign = await harness.submit(inputs={"a": 1}, tenant="other")
    await harness.run_one()
    await harness.advance(61)
    removed = [*await prune(harness, Retention(newest=2)), *await prune(harness, Retention(newest=2))]
    assert sorted(removed) == sorted(job.id for job in same[:3])
    assert await prune(harness, Retention(newest=2)) == []
    assert await left(harness) == {same[3].id, same[4].id, other.id}
    assert (await harness.store.jobs.get(foreign.id, tenant="other")).status is Status.SUCCEEDED


async def test_active_referenced_blocking_and_just_built_jobs_stay(harness: StoreHarness) -> None:
    """Proves J16."""
    waiting = await harness.submit(queue="other")
    running = await harness.submit()
    (lease,) = await harness.claim()
    assert lease.id == running.id
    blocker = await harness.submit(lane="L")
    (lease,) = await harness.claim()
    await harness.fail(lease)
    parent = await harness.submit()
    needing = await harness.submit(needs=[parent.id, waiting.id])
    (lease,) = await harness.claim()
    await harness.finish(lease)
    paused = await harness.submit(lane="P")
    (lease,) = await harness.claim()
    await harness.store.jobs.interrupt(paused.id)
    await harness.finish(lease, INTERRUPTED)
    await harness.advance(365 * DAY)
    fresh = await harness.submit()
    await harness.run_one()
    everything = Retention(ages=dict.fromkeys([s for s in Status if s.terminal], 0.0), newest=1)
    assert set(await prune(harness, everything)) == {parent.id}
    assert await left(harness) == {waiting.id, running.id, blocker.id, needing.id, paused.id, fresh.id}
    await harness.store.jobs.dismiss(blocker.id)
    assert await prune(harness, everything) == [blocker.id]


async def test_parent_of_a_waiting_job_stays_until_its_needs_are_ticked_off(harness: StoreHarness) -> None:
    """Proves J16."""
    parent = await harness.submit()
    other = await harness.submit(queue="other")
    child = await harness.submit(needs=[parent.id, other.id])
    await harness.run_one()
    await harness.advance(8 * DAY)
    await prune(harness, WEEK)
    (lease,) = await harness.claim(queue="other")
    await harness.finish(lease)
    assert [lease.id for lease in await harness.claim()] == [child.id]


async def test_parent_stays_while_a_dependant_was_not_looked_at(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves J16."""

    async def nothing(*_: object, **__: object) -> None:
        """The caller died before its follow-up."""

    parent = await harness.submit()
    with monkeypatch.context() as patch:
        patch.setattr(harness.store.gates, "follow_up", nothing)
        child = await harness.submit(needs=[parent.id])
        await harness.run_one()
    await harness.advance(8 * DAY)
    assert await prune(harness, WEEK) == []
    await harness.store.gates.resolve()
    assert [lease.id for lease in await harness.claim()] == [child.id]
    assert await prune(harness, WEEK) == [parent.id]


async def test_pruner_visits_all_jobs_in_bounded_steps(harness: StoreHarness) -> None:
    """Proves J16."""
    for _ in range(7):
        await harness.submit()
        await harness.run_one()
    await harness.advance(8 * DAY)
    pruner = Pruner(harness.store, WEEK)
    removed = [await pruner.run_once() for _ in range(2)]
    assert removed == [7, 0]
    assert await left(harness) == set()


@pytest.mark.parametrize(
    "bad", [{"ages": {Status.RUNNING: 1.0}}, {"ages": {Status.FAILED: -1.0}}, {"newest": 0}], ids=str
)
def test_invalid_retention_is_refused(bad: dict[str, object]) -> None:
    """Proves J16."""
    with pytest.raises(Invalid):
        Retention(**bad)  # type: ignore[arg-type]


async def test_counts_come_from_small_indexes(harness: StoreHarness) -> None:
    first = await harness.submit()
    await harness.submit(needs=[first.id])
    await harness.submit(hold=True)
    await harness.submit(available_at=harness.later(60).isoformat())
    await harness.submit(lane="L")
    await harness.submit(lane="L")
    await harness.claim(1)
    counts = await harness.store.pruning.counts()
    found = {name: getattr(counts, name) for name in counts.__struct_fields__ if name != "total"}
    assert found == {"open": 1, "future": 1, "needs": 1, "lane": 1, "held": 1, "unresolved": 0, "running": 1}
