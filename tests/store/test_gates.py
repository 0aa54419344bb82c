"""Dependencies: who waits for whom, how failures travel, and how they come back."""

import pytest

from holdfast.errors import Conflict, Invalid, NeedFailed, NotFound
from holdfast.model import Cause, Error, Gate, Outcome, Status, new_id
from tests.support.store_fixture import Stage

JOB = {"runner": "function", "spec": {"name": "f"}}


async def test_dependant_is_claimable_only_when_all_its_needs_succeeded(stage: Stage) -> None:
    """Proves N6."""
    one, two = await stage.submit(), await stage.submit()
    child = await stage.submit(needs=[one.id, two.id])
    assert child.gate is Gate.NEEDS
    first, second = await stage.claim()
    await stage.finish(first)
    assert await stage.claim() == []
    await stage.finish(second)
    assert [lease.id for lease in await stage.claim()] == [child.id]


async def test_need_that_already_succeeded_is_no_gate(stage: Stage) -> None:
    """Proves N6."""
    parent = await stage.submit()
    await stage.run_one()
    assert (await stage.submit(needs=[parent.id])).gate is Gate.OPEN


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome.failed("exit_nonzero", "boom"), "failed: boom"),
        (Outcome(status=Status.TIMED_OUT, cause=Cause.TIMED_OUT), "timed out"),
        (Outcome(status=Status.CANCELLED, cause=Cause.CANCELLED), "was cancelled"),
    ],
)
async def test_failure_travels_through_the_whole_tree_and_names_its_cause(
    stage: Stage, outcome: Outcome, words: str
) -> None:
    """Proves N6."""
    root = await stage.submit()
    child = await stage.submit(needs=[root.id], lane="L")
    held = await stage.submit(needs=[root.id], hold=True)
    grandchild = await stage.submit(needs=[child.id])
    (lease,) = await stage.claim()
    await stage.finish(lease, outcome)
    error = Error(code="dependency_failed", message=f"needs job {root.id}, which {words}")
    for job in (child, held):
        record = await stage.get(job)
        assert (record.status, record.error, record.started_at) == (Status.FAILED, error, None)
    record = await stage.get(grandchild)
    message = f"needs job {child.id}, which failed: {error.message}"
    assert record.error == Error(code="dependency_failed", message=message)
    # Ended without a start: it blocks no lane.
    other = await stage.submit(lane="L")
    assert (await stage.get(other)).gate is Gate.OPEN


async def test_cancel_of_a_waiting_need_fails_its_dependants(stage: Stage) -> None:
    """Proves N6."""
    parent = await stage.submit(hold=True)
    child = await stage.submit(needs=[parent.id])
    await stage.store.jobs.cancel(parent.id)
    assert (await stage.get(child)).error == Error(
        code="dependency_failed", message=f"needs job {parent.id}, which was cancelled"
    )


async def test_bulk_may_refer_to_itself_in_any_order(stage: Stage) -> None:
    """Proves N6."""
    top, left, right, bottom = (new_id() for _ in range(4))
    await stage.store.jobs.submit_many(
        [
            {**JOB, "id": bottom, "needs": [left, right]},
            {**JOB, "id": left, "needs": [top]},
            {**JOB, "id": right, "needs": [top]},
            {**JOB, "id": top},
        ]
    )
    ran = []
    while claimed := await stage.claim():
        ran.append({lease.id for lease in claimed})
        for lease in claimed:
            await stage.finish(lease)
    assert ran == [{top}, {left, right}, {bottom}]


async def test_cycles_and_unknown_foreign_or_failed_needs_are_refused(stage: Stage) -> None:
    """Proves N6."""
    a, b, c = (new_id() for _ in range(3))
    circle = [{**JOB, "id": a, "needs": [c]}, {**JOB, "id": b, "needs": [a]}, {**JOB, "id": c, "needs": [b]}]
    with pytest.raises(Invalid, match="in a cycle"):
        await stage.store.jobs.submit_many([{**JOB}, *circle])
    with pytest.raises(Invalid, match="needs itself"):
        await stage.submit(id=a, needs=[a])
    with pytest.raises(Invalid, match="twice"):
        await stage.submit(needs=[a, a])
    with pytest.raises(NotFound, match=a):
        await stage.submit(needs=[a])
    foreign = await stage.submit(tenant="someone", hold=True)
    with pytest.raises(NotFound, match=foreign.id):
        await stage.submit(needs=[foreign.id])
    failed = await stage.submit()
    (lease,) = await stage.claim()
    await stage.fail(lease)
    with pytest.raises(NeedFailed, match=rf"job {failed.id} failed"):
        await stage.submit(needs=[failed.id])
    assert [job.id for job in (await stage.store.jobs.list()).items] == [failed.id]


async def test_resume_revives_dependants_that_failed_only_because_of_it(stage: Stage) -> None:
    """Proves C8, N6."""
    one, two = await stage.submit(), await stage.submit()
    only_one = await stage.submit(needs=[one.id])
    both = await stage.submit(needs=[one.id, two.id])
    held = await stage.submit(needs=[one.id], hold=True)
    grandchild = await stage.submit(needs=[only_one.id])
    first, second = await stage.claim()
    await stage.fail(first)
    await stage.fail(second)
    await stage.store.jobs.resume(one.id)
    assert [(await stage.get(job)).status for job in (only_one, both, held, grandchild)] == [
        Status.QUEUED,
        Status.FAILED,
        Status.PENDING,
        Status.QUEUED,
    ]
    await stage.store.jobs.resolve(two.id)
    assert await stage.status(both) is Status.QUEUED
    await stage.store.jobs.release(held.id)
    ran = set()
    while claimed := await stage.claim():
        ran |= {lease.id for lease in claimed}
        for lease in claimed:
            await stage.finish(lease)
    assert ran == {one.id, only_one.id, both.id, held.id, grandchild.id}


async def test_requeue_of_a_job_with_dependants_keeps_them_waiting(stage: Stage) -> None:
    """Proves N6."""
    parent = await stage.submit(max_attempts=2)
    child = await stage.submit(needs=[parent.id])
    (lease,) = await stage.claim()
    assert await stage.finish(lease, Outcome.requeued(Cause.EXIT)) is Status.QUEUED
    assert (await stage.get(child)).gate is Gate.NEEDS


async def test_need_that_succeeded_stays_satisfied_after_it_was_deleted(stage: Stage) -> None:
    """Proves C8, N8."""
    good, bad = await stage.submit(), await stage.submit()
    child = await stage.submit(needs=[good.id, bad.id])
    await stage.store.jobs.cancel(bad.id)
    assert await stage.status(child) is Status.FAILED
    await stage.run_one()
    await stage.store.jobs.delete(good.id)
    await stage.store.jobs.resume(bad.id)
    assert await stage.status(child) is Status.QUEUED


async def test_revived_dependant_blocks_its_lane_again(stage: Stage) -> None:
    """Proves C8, N2."""
    parent = await stage.submit()
    child = await stage.submit(lane="L", needs=[parent.id])
    await stage.store.jobs.cancel(parent.id)
    await stage.store.jobs.dismiss(child.id)
    await stage.store.jobs.resume(parent.id)
    assert not (await stage.get(child)).dismissed
    behind = await stage.submit(lane="L")
    (lease,) = await stage.claim(slots=1)
    await stage.finish(lease)
    (lease,) = await stage.claim()
    assert lease.id == child.id
    await stage.fail(lease)
    assert (await stage.get(behind)).gate is Gate.LANE


async def test_resolve_counts_as_success_for_dependants(stage: Stage) -> None:
    """Proves C8."""
    parent = await stage.submit()
    child = await stage.submit(needs=[parent.id])
    (lease,) = await stage.claim()
    await stage.fail(lease)
    assert await stage.status(child) is Status.FAILED
    await stage.store.jobs.resolve(parent.id, {"by": "hand"})
    assert (await stage.get(child)).gate is Gate.OPEN
    assert (await stage.get(child)).error is None


async def test_paused_need_keeps_its_dependants_waiting(stage: Stage) -> None:
    """Proves N6."""
    parent = await stage.submit()
    child = await stage.submit(needs=[parent.id])
    (lease,) = await stage.claim()
    await stage.finish(lease, Outcome(status=Status.PAUSED, cause=Cause.INTERRUPTED))
    assert (await stage.get(child)).gate is Gate.NEEDS
    await stage.store.jobs.resume(parent.id)
    await stage.run_one()
    assert (await stage.get(child)).gate is Gate.OPEN


async def test_deleted_need_never_leaves_a_dependant_waiting(stage: Stage) -> None:
    """Proves N8."""
    done, open_need = await stage.submit(), await stage.submit(spec={"name": "g"})
    both = await stage.submit(needs=[done.id, open_need.id])
    await stage.run_one()
    assert (await stage.store.jobs.delete(done.id)).outcome == "deleted"
    (lease,) = await stage.claim(name="g")
    await stage.finish(lease)
    assert (await stage.get(both)).gate is Gate.OPEN

    doomed = await stage.submit(hold=True)
    waiting = await stage.submit(needs=[doomed.id])
    assert (await stage.store.jobs.delete(doomed.id, force=True)).outcome == "deleted"
    record = await stage.get(waiting)
    assert record.error == Error(code="dependency_failed", message=f"needs job {doomed.id}, which was cancelled")
    with pytest.raises(Conflict, match=f"needs job {doomed.id}, which was deleted"):
        await stage.store.jobs.resume(waiting.id)


@pytest.mark.parametrize("succeeded", [True, False])
async def test_need_deleted_before_the_dependant_was_looked_at_still_counts_as_it_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, succeeded: bool
) -> None:
    """Proves N8."""
    parent = await stage.submit()

    async def nothing(*_: object, **__: object) -> None:
        """The caller died before its follow-up."""

    monkeypatch.setattr(stage.store.gates, "follow_up", nothing)
    child = await stage.submit(needs=[parent.id])
    assert child.gate is Gate.UNRESOLVED
    (lease,) = await stage.claim()
    await (stage.finish(lease) if succeeded else stage.fail(lease))
    monkeypatch.setattr(stage.store.gates, "resolve", nothing)
    assert (await stage.store.jobs.delete(parent.id)).outcome == "deleted"
    monkeypatch.undo()
    await stage.store.gates.resolve()
    record = await stage.get(child)
    if succeeded:
        assert record.gate is Gate.OPEN
    else:
        assert record.error == Error(code="dependency_failed", message=f"needs job {parent.id}, which was deleted")


async def test_resolver_finishes_what_a_dead_caller_or_worker_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves N6."""

    async def nothing(*_: object, **__: object) -> None:
        """The process that should follow up has died."""

    monkeypatch.setattr(stage.store.gates, "follow_up", nothing)
    parent = await stage.submit(lane="L")
    child = await stage.submit(needs=[parent.id])
    assert await stage.claim() == []
    await stage.store.gates.resolve()
    (lease,) = await stage.claim()
    await stage.finish(lease)
    assert await stage.claim() == []
    assert await stage.store.gates.resolve() > 0
    assert [lease.id for lease in await stage.claim()] == [child.id]


async def test_thousand_dependants_of_one_job_all_come_through(stage: Stage) -> None:
    """Proves N6."""
    parent = await stage.submit()
    await stage.store.jobs.submit_many([{**JOB, "needs": [parent.id]} for _ in range(1000)])
    (lease,) = await stage.claim(slots=2)
    await stage.fail(lease)
    assert len((await stage.store.jobs.list(status=[Status.FAILED], limit=1000)).items) == 1000
    await stage.store.jobs.resume(parent.id)
    await stage.run_one()
    assert len(await stage.claim(slots=2000)) == 1000


async def test_delayed_dependant_waits_for_both(stage: Stage) -> None:
    parent = await stage.submit()
    child = await stage.submit(needs=[parent.id], available_at=stage.later(60).isoformat())
    await stage.run_one()
    assert (await stage.get(child)).gate is Gate.FUTURE
    await stage.advance(60)
    assert await stage.store.gates.promote() == 1
    assert (await stage.get(child)).gate is Gate.OPEN


async def test_stuck_gates_are_found_mended_and_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = await stage.submit()
    child = await stage.submit(needs=[parent.id])
    laned = await stage.submit(lane="L")
    # What no operation does: the parent ends behind everybody's back, and the lane forgets its holder.
    (one, two) = await stage.claim()
    assert {one.id, two.id} == {parent.id, laned.id}
    follower = await stage.submit(lane="L")

    async def sabotage(tx: object) -> None:
        await tx.rows("set_holders", rows=[{"tenant": "default", "lane": "L", "holder": None}])  # type: ignore[attr-defined]

    async def nothing(*_: object, **__: object) -> None:
        """No follow-up."""

    monkeypatch.setattr(stage.store.gates, "follow_up", nothing)
    await stage.finish(one if one.id == parent.id else two)
    (settled,) = await stage.store.database.read("job_seq", id=parent.id)
    await stage.store.database.rows("settled", id=parent.id, seq=settled["seq"])
    monkeypatch.undo()
    await stage.store.jobs.cancel(laned.id)
    await stage.finish(one if one.id == laned.id else two, Outcome(status=Status.CANCELLED, cause=Cause.CANCELLED))
    await stage.store.database.rows("shut_jobs", ids=[follower.id])
    await stage.store.database.transact(sabotage)
    assert await stage.claim() == []
    assert await stage.store.gates.repair() == 2
    assert stage.store.counters.gate_repairs == 2
    assert {lease.id for lease in await stage.claim()} == {child.id, follower.id}
    assert await stage.store.gates.repair() == 0
    stage.store.counters.gate_repairs = 0  # these two were ours
