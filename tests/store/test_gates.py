"""Dependencies: waiting, failures of dependencies, and revival."""

from collections.abc import Awaitable, Callable

import pytest

from holdfast.errors import Conflict, Invalid, NeedFailed, NotFound, StoreError
from holdfast.model import Cause, Error, Gate, Outcome, Status, new_id
from holdfast.store.database import Tx
from tests.support.store_harness import StoreHarness

JOB = {"runner": "function", "spec": {"name": "f"}}


async def test_dependant_is_claimable_only_when_all_its_needs_succeeded(harness: StoreHarness) -> None:
    """Proves N6."""
    one, two = await harness.submit(), await harness.submit()
    child = await harness.submit(needs=[one.id, two.id])
    assert child.gate is Gate.NEEDS
    first, second = await harness.claim()
    await harness.finish(first)
    assert await harness.claim() == []
    await harness.finish(second)
    assert [lease.id for lease in await harness.claim()] == [child.id]


async def test_need_that_already_succeeded_is_no_gate(harness: StoreHarness) -> None:
    """Proves N6."""
    parent = await harness.submit()
    await harness.run_one()
    assert (await harness.submit(needs=[parent.id])).gate is Gate.OPEN


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome.failed("exit_nonzero", "boom"), "failed: boom"),
        (Outcome(status=Status.TIMED_OUT, cause=Cause.TIMED_OUT), "timed out"),
        (Outcome(status=Status.CANCELLED, cause=Cause.CANCELLED), "was cancelled"),
    ],
)
async def test_failure_reaches_all_dependants_and_names_its_cause(
    harness: StoreHarness, outcome: Outcome, words: str
) -> None:
    """Proves N6."""
    root = await harness.submit()
    child = await harness.submit(needs=[root.id], lane="L")
    held = await harness.submit(needs=[root.id], hold=True)
    grandchild = await harness.submit(needs=[child.id])
    (lease,) = await harness.claim()
    await harness.finish(lease, outcome)
    error = Error(code="dependency_failed", message=f"needs job {root.id}, which {words}")
    for job in (child, held):
        record = await harness.get(job)
        assert (record.status, record.error, record.started_at) == (Status.FAILED, error, None)
    record = await harness.get(grandchild)
    message = f"needs job {child.id}, which failed: {error.message}"
    assert record.error == Error(code="dependency_failed", message=message)
    # Ended without a start: it blocks no lane.
    other = await harness.submit(lane="L")
    assert (await harness.get(other)).gate is Gate.OPEN


async def test_cancel_of_a_waiting_need_fails_its_dependants(harness: StoreHarness) -> None:
    """Proves N6."""
    parent = await harness.submit(hold=True)
    child = await harness.submit(needs=[parent.id])
    await harness.store.jobs.cancel(parent.id)
    assert (await harness.get(child)).error == Error(
        code="dependency_failed", message=f"needs job {parent.id}, which was cancelled"
    )


async def test_bulk_may_refer_to_itself_in_any_order(harness: StoreHarness) -> None:
    """Proves N6."""
    top, left, right, bottom = (new_id() for _ in range(4))
    await harness.store.jobs.submit_many(
        [
            {**JOB, "id": bottom, "needs": [left, right]},
            {**JOB, "id": left, "needs": [top]},
            {**JOB, "id": right, "needs": [top]},
            {**JOB, "id": top},
        ]
    )
    ran = []
    while claimed := await harness.claim():
        ran.append({lease.id for lease in claimed})
        for lease in claimed:
            await harness.finish(lease)
    assert ran == [{top}, {left, right}, {bottom}]


async def test_cycles_and_unknown_foreign_or_failed_needs_are_refused(harness: StoreHarness) -> None:
    """Proves N6."""
    a, b, c = (new_id() for _ in range(3))
    circle = [{**JOB, "id": a, "needs": [c]}, {**JOB, "id": b, "needs": [a]}, {**JOB, "id": c, "needs": [b]}]
    with pytest.raises(Invalid, match="in a cycle"):
        await harness.store.jobs.submit_many([{**JOB}, *circle])
    with pytest.raises(Invalid, match="needs itself"):
        await harness.submit(id=a, needs=[a])
    with pytest.raises(Invalid, match="twice"):
        await harness.submit(needs=[a, a])
    with pytest.raises(NotFound, match=a):
        await harness.submit(needs=[a])
    foreign = await harness.submit(tenant="someone", hold=True)
    with pytest.raises(NotFound, match=foreign.id):
        await harness.submit(needs=[foreign.id])
    failed = await harness.submit()
    (lease,) = await harness.claim()
    await harness.fail(lease)
    with pytest.raises(NeedFailed, match=rf"job {failed.id} failed"):
        await harness.submit(needs=[failed.id])
    assert [job.id for job in (await harness.store.jobs.list()).items] == [failed.id]


async def test_resume_revives_dependants_that_failed_only_because_of_it(harness: StoreHarness) -> None:
    """Proves C8, N6."""
    one, two = await harness.submit(), await harness.submit()
    only_one = await harness.submit(needs=[one.id])
    both = await harness.submit(needs=[one.id, two.id])
    held = await harness.submit(needs=[one.id], hold=True)
    grandchild = await harness.submit(needs=[only_one.id])
    first, second = await harness.claim()
    await harness.fail(first)
    await harness.fail(second)
    await harness.store.jobs.resume(one.id)
    assert [(await harness.get(job)).status for job in (only_one, both, held, grandchild)] == [
        Status.QUEUED,
        Status.FAILED,
        Status.PENDING,
        Status.QUEUED,
    ]
    await harness.store.jobs.resolve(two.id)
    assert await harness.status(both) is Status.QUEUED
    await harness.store.jobs.release(held.id)
    ran = set()
    while claimed := await harness.claim():
        ran |= {lease.id for lease in claimed}
        for lease in claimed:
            await harness.finish(lease)
    assert ran == {one.id, only_one.id, both.id, held.id, grandchild.id}


async def test_requeue_of_a_job_with_dependants_keeps_them_waiting(harness: StoreHarness) -> None:
    """Proves N6."""
    parent = await harness.submit(max_attempts=2)
    child = await harness.submit(needs=[parent.id])
    (lease,) = await harness.claim()
    assert await harness.finish(lease, Outcome.requeued(Cause.EXIT)) is Status.QUEUED
    assert (await harness.get(child)).gate is Gate.NEEDS


async def test_need_that_succeeded_stays_satisfied_after_it_was_deleted(harness: StoreHarness) -> None:
    """Proves C8, N8."""
    good, bad = await harness.submit(), await harness.submit()
    child = await harness.submit(needs=[good.id, bad.id])
    await harness.store.jobs.cancel(bad.id)
    assert await harness.status(child) is Status.FAILED
    await harness.run_one()
    await harness.store.jobs.delete(good.id)
    await harness.store.jobs.resume(bad.id)
    assert await harness.status(child) is Status.QUEUED


async def test_revived_dependant_blocks_its_lane_again(harness: StoreHarness) -> None:
    """Proves C8, N2."""
    parent = await harness.submit()
    child = await harness.submit(lane="L", needs=[parent.id])
    await harness.store.jobs.cancel(parent.id)
    await harness.store.jobs.dismiss(child.id)
    await harness.store.jobs.resume(parent.id)
    assert not (await harness.get(child)).dismissed
    later = await harness.submit(lane="L")
    (lease,) = await harness.claim(slots=1)
    await harness.finish(lease)
    (lease,) = await harness.claim()
    assert lease.id == child.id
    await harness.fail(lease)
    assert (await harness.get(later)).gate is Gate.LANE


async def test_resolve_counts_as_success_for_dependants(harness: StoreHarness) -> None:
    """Proves C8."""
    parent = await harness.submit()
    child = await harness.submit(needs=[parent.id])
    (lease,) = await harness.claim()
    await harness.fail(lease)
    assert await harness.status(child) is Status.FAILED
    await harness.store.jobs.resolve(parent.id, {"by": "hand"})
    assert (await harness.get(child)).gate is Gate.OPEN
    assert (await harness.get(child)).error is None


async def test_paused_need_keeps_its_dependants_waiting(harness: StoreHarness) -> None:
    """Proves N6."""
    parent = await harness.submit()
    child = await harness.submit(needs=[parent.id])
    (lease,) = await harness.claim()
    await harness.finish(lease, Outcome(status=Status.PAUSED, cause=Cause.INTERRUPTED))
    assert (await harness.get(child)).gate is Gate.NEEDS
    await harness.store.jobs.resume(parent.id)
    await harness.run_one()
    assert (await harness.get(child)).gate is Gate.OPEN


async def test_deleted_need_never_leaves_a_dependant_waiting(harness: StoreHarness) -> None:
    """Proves N8."""
    done, open_need = await harness.submit(), await harness.submit(spec={"name": "g"})
    both = await harness.submit(needs=[done.id, open_need.id])
    await harness.run_one()
    assert (await harness.store.jobs.delete(done.id)).outcome == "deleted"
    (lease,) = await harness.claim(name="g")
    await harness.finish(lease)
    assert (await harness.get(both)).gate is Gate.OPEN

    doomed = await harness.submit(hold=True)
    waiting = await harness.submit(needs=[doomed.id])
    assert (await harness.store.jobs.delete(doomed.id, force=True)).outcome == "deleted"
    record = await harness.get(waiting)
    assert record.error == Error(code="dependency_failed", message=f"needs job {doomed.id}, which was cancelled")
    with pytest.raises(Conflict, match=f"needs job {doomed.id}, which was deleted"):
        await harness.store.jobs.resume(waiting.id)


@pytest.mark.parametrize("succeeded", [True, False])
async def test_need_deleted_before_its_dependant_was_resolved_counts_as_it_ended(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch, succeeded: bool
) -> None:
    """Proves N8."""
    parent = await harness.submit()

    async def nothing(*_: object, **__: object) -> None:
        """The caller died before its follow-up."""

    monkeypatch.setattr(harness.store.gates, "follow_up", nothing)
    child = await harness.submit(needs=[parent.id])
    assert child.gate is Gate.UNRESOLVED
    (lease,) = await harness.claim()
    await (harness.finish(lease) if succeeded else harness.fail(lease))
    monkeypatch.setattr(harness.store.gates, "resolve", nothing)
    assert (await harness.store.jobs.delete(parent.id)).outcome == "deleted"
    monkeypatch.undo()
    await harness.store.gates.resolve()
    record = await harness.get(child)
    if succeeded:
        assert record.gate is Gate.OPEN
    else:
        assert record.error == Error(code="dependency_failed", message=f"needs job {parent.id}, which was deleted")


async def test_resolver_finishes_the_follow_up_of_a_dead_process(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves N6."""

    async def nothing(*_: object, **__: object) -> None:
        """The process that should follow up has died."""

    monkeypatch.setattr(harness.store.gates, "follow_up", nothing)
    parent = await harness.submit(lane="L")
    child = await harness.submit(needs=[parent.id])
    assert await harness.claim() == []
    await harness.store.gates.resolve()
    (lease,) = await harness.claim()
    await harness.finish(lease)
    assert await harness.claim() == []
    assert await harness.store.gates.resolve() > 0
    assert [lease.id for lease in await harness.claim()] == [child.id]


async def test_resolving_one_lane_leaves_the_jobs_of_others_to_theirs(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object, **__: object) -> None:
        """The process that should follow up has died."""

    monkeypatch.setattr(harness.store.gates, "follow_up", nothing)
    places = [("a", "L"), ("a", "M"), ("b", "L"), ("a", None)]
    jobs = [await harness.store.jobs.submit({**JOB, "lane": lane}, tenant=tenant) for tenant, lane in places]
    before = [job.gate for job in jobs]
    await harness.store.gates.resolve_lanes([("a", "L")])
    after = [(await harness.store.jobs.get(job.id, tenant=job.tenant)).gate for job in jobs]
    assert after == [Gate.OPEN, *before[1:]]
    assert before[:3] == [Gate.UNRESOLVED] * 3


async def test_thousand_dependants_of_one_job_all_become_claimable(harness: StoreHarness) -> None:
    """Proves N6."""
    parent = await harness.submit()
    await harness.store.jobs.submit_many([{**JOB, "needs": [parent.id]} for _ in range(1000)])
    (lease,) = await harness.claim(slots=2)
    await harness.fail(lease)
    assert len((await harness.store.jobs.list(status=[Status.FAILED], limit=1000)).items) == 1000
    await harness.store.jobs.resume(parent.id)
    await harness.run_one()
    assert len(await harness.claim(slots=2000)) == 1000


async def test_process_that_dies_between_two_pages_of_dependants_leaves_the_rest_to_the_duty(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = await harness.submit()
    children = [await harness.submit(needs=[parent.id]) for _ in range(3)]
    monkeypatch.setattr("holdfast.store.gates.BATCH", 2)
    pages = 0
    transact = harness.store.database.transact

    async def dies_after_a_page(change: Callable[[Tx], Awaitable[object]]) -> object:
        nonlocal pages
        pages += 1
        if pages > 1:
            raise StoreError("the process dies here")
        return await transact(change)

    async def nothing(*_: object, **__: object) -> None:
        """No follow-up."""

    with monkeypatch.context() as patch:
        patch.setattr(harness.store.gates, "follow_up", nothing)
        await harness.run_one()
        patch.setattr(harness.store.database, "transact", dies_after_a_page)
        with pytest.raises(StoreError):
            await harness.store.gates._settle(parent.id)
    await harness.store.gates.resolve()
    assert {lease.id for lease in await harness.claim()} == {child.id for child in children}


async def test_delayed_dependant_waits_for_both(harness: StoreHarness) -> None:
    parent = await harness.submit()
    child = await harness.submit(needs=[parent.id], available_at=harness.later(60).isoformat())
    await harness.run_one()
    assert (await harness.get(child)).gate is Gate.FUTURE
    await harness.advance(60)
    assert await harness.store.gates.promote() == 1
    assert (await harness.get(child)).gate is Gate.OPEN


async def test_stuck_gates_are_found_repaired_and_counted(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = await harness.submit()
    child = await harness.submit(needs=[parent.id])
    laned = await harness.submit(lane="L")
    # What no operation does: the parent ends without a follow-up, and the lane loses its holder.
    (one, two) = await harness.claim()
    assert {one.id, two.id} == {parent.id, laned.id}
    follower = await harness.submit(lane="L")

    async def sabotage(tx: object) -> None:
        await tx.rows("set_holders", rows=[{"tenant": "default", "lane": "L", "holder": None}])  # type: ignore[attr-defined]

    async def nothing(*_: object, **__: object) -> None:
        """No follow-up."""

    monkeypatch.setattr(harness.store.gates, "follow_up", nothing)
    await harness.finish(one if one.id == parent.id else two)
    (settled,) = await harness.store.database.read("job_seq", id=parent.id)
    await harness.store.database.rows("settled", id=parent.id, seq=settled["seq"])
    monkeypatch.undo()
    await harness.store.jobs.cancel(laned.id)
    await harness.finish(one if one.id == laned.id else two, Outcome(status=Status.CANCELLED, cause=Cause.CANCELLED))
    await harness.store.database.rows("close_gates", ids=[follower.id])
    await harness.store.database.transact(sabotage)
    assert await harness.claim() == []
    assert await harness.store.gates.repair() == 2
    assert harness.store.counters.gate_repairs == 2
    assert {lease.id for lease in await harness.claim()} == {child.id, follower.id}
    assert await harness.store.gates.repair() == 0
    harness.store.counters.gate_repairs = 0  # these two were ours
