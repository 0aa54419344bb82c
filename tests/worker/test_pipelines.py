"""Pipelines of processes, with a real worker: order, cache, modes, failures, stops."""

import time
from datetime import UTC, datetime

import pytest

from holdfast.model import Lease, Status
from holdfast.worker import supervisor_link
from tests.support.pipelines import Pipelines, adds, task


async def test_tasks_run_in_order_in_one_workspace(pipelines: Pipelines) -> None:
    """Proves P1, P7, E7."""
    workers = pipelines.workers
    async with workers.worker():
        job = await workers.ended(await pipelines.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two", "three"]
    assert (job.attempts, job.exit_code) == (1, 0)
    statuses = [
        (event.task, event.data["status"]) for event in await workers.events(job, "task") if "status" in event.data
    ]
    assert statuses == [(name, status) for name in ("one", "two", "three") for status in ("running", "succeeded")]
    lines = [(event.task, line) for event in await workers.events(job, "log") for line in event.data["lines"]]
    assert lines == [
        ("one", "one"),
        *(("two", w) for w in ("one", "two")),
        *(("three", w) for w in ("one", "two", "three")),
    ]
    records = await pipelines.tasks(job)
    assert [(record.name, record.status, record.exit_code) for record in records] == [
        (name, "succeeded", 0) for name in ("one", "two", "three")
    ]
    for record in records:
        assert record.started_at is not None
        assert record.ended_at is not None
        assert record.started_at <= record.ended_at
    assert {record.snapshot for record in records} == {snapshot.id for snapshot in await pipelines.snapshots()}
    assert await pipelines.content("three") == "one\ntwo\nthree\n"
    assert workers.folders == []


async def test_end_of_a_task_does_not_include_its_copy(pipelines: Pipelines) -> None:
    """Proves P1."""
    workers, copied = pipelines.workers, []

    def slowly(step: str, lease: Lease) -> None:
        if step == "copy":
            time.sleep(1)  # Reason: this is the copy that takes long.
            copied.append(datetime.now(UTC))

    async with workers.worker(at=slowly):
        job = await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    for record, copied_at in zip(await pipelines.tasks(job), copied, strict=True):
        assert record.started_at is not None
        assert record.ended_at is not None
        assert record.started_at <= record.ended_at < copied_at


async def test_second_job_starts_nothing(pipelines: Pipelines) -> None:
    """Proves P4."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        again = await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two"]
    assert await pipelines.statuses(again) == ["cached", "cached"]
    assert again.attempts == 0
    assert len(await pipelines.snapshots()) == 2


async def test_pipeline_continues_after_its_latest_snapshot(pipelines: Pipelines) -> None:
    """Proves P2, P4: what is known is restored, not run."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
        other = await workers.ended(await pipelines.submit(adds("one"), adds("two"), adds("four")), Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two", "three", "four"]
    assert await pipelines.statuses(other) == ["cached", "cached", "succeeded"]
    assert await pipelines.content("four") == "one\ntwo\nfour\n"


@pytest.mark.parametrize(("mode", "kept"), [("always", ["one", "two"]), ("final", ["two"]), ("none", [])])
async def test_mode_says_what_is_kept(pipelines: Pipelines, mode: str, kept: list[str]) -> None:
    """Proves P7."""
    workers = pipelines.workers
    async with workers.worker():
        await workers.ended(await pipelines.submit(adds("one"), adds("two"), snapshot=mode), Status.SUCCEEDED)
    assert await pipelines.kept() == kept


async def test_first_failure_fails_the_job_and_keeps_nothing_of_it(pipelines: Pipelines) -> None:
    """Proves P1, P7. A resume continues after the stored tasks."""
    workers = pipelines.workers
    async with workers.worker():
        tasks = (adds("one"), task("two", 'test -e "$GATE"; echo two >> made'), adds("three"))
        spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(pipelines.marker.with_name("gate"))}}
        job = await workers.ended(await pipelines.submit(*tasks, spec=spec), Status.FAILED)
        assert (job.exit_code, job.error and job.error.code) == (1, "exit_nonzero")
        assert await pipelines.statuses(job) == ["succeeded", "failed", "pending"]
        assert await pipelines.kept() == ["one"]
        pipelines.marker.with_name("gate").touch()
        await workers.store.jobs.resume(job.id)
        await workers.ended(job, Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two", "two", "three"]
    assert await pipelines.statuses(job) == ["succeeded", "succeeded", "succeeded"]
    assert await pipelines.content("three") == "one\ntwo\nthree\n"


async def test_cancel_keeps_nothing_of_the_task_that_it_stops(pipelines: Pipelines) -> None:
    """Proves P7, C1."""
    workers = pipelines.workers
    async with workers.worker():
        job = await pipelines.submit(adds("one"), task("two", "echo here; sleep 600"), stop_grace=1)
        await workers.wait_for_log(job, "here")
        await workers.store.jobs.cancel(job.id)
        await workers.ended(job, Status.CANCELLED)
    assert await pipelines.statuses(job) == ["succeeded", "cancelled"]
    assert await pipelines.kept() == ["one"]
    assert workers.folders == []


async def test_resumed_pipeline_continues_after_its_stored_tasks(pipelines: Pipelines) -> None:
    """Proves C1, C5, P2: it was cancelled; what was done is not done again, and the cancel does not come back."""
    workers = pipelines.workers
    gate = pipelines.marker.with_name("gate")
    spec = {"env": {"MARKER": str(pipelines.marker), "GATE": str(gate)}}
    waits = task("three", 'cat made; echo here; while [ ! -e "$GATE" ]; do sleep 0.05; done; echo three >> made')
    async with workers.worker():
        job = await pipelines.submit(adds("one"), adds("two"), waits, adds("four"), spec=spec, stop_grace=0)
        await workers.wait_for_log(job, "here")
        await workers.store.jobs.cancel(job.id)
        await workers.ended(job, Status.CANCELLED)
        assert await pipelines.kept() == ["one", "two"]
        gate.touch()
        await workers.store.jobs.resume(job.id)
        await workers.ended(job, Status.SUCCEEDED)
    assert pipelines.ran() == ["one", "two", "three", "three", "four"]
    assert await pipelines.statuses(job) == ["succeeded"] * 4
    assert await pipelines.content("four") == "one\ntwo\nthree\nfour\n"


@pytest.mark.parametrize("whole", [True, False])
async def test_limits_of_time_hold_for_each_task_and_for_all(pipelines: Pipelines, whole: bool) -> None:
    """Proves P1, R8."""
    workers = pipelines.workers
    async with workers.worker():
        slow = task("two", "sleep 600") if whole else task("two", "sleep 600", timeout=0.5)
        job = await pipelines.submit(adds("one"), slow, timeout=8 if whole else None, stop_grace=0)
        job = await workers.ended(job, Status.TIMED_OUT)
    assert await pipelines.statuses(job) == ["succeeded", "timed_out"]
    assert await pipelines.kept() == ["one"]


async def test_commands_to_the_supervisor_may_be_repeated(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves P2, P12.

    If the worker or its database stalls between a command and its reply, the worker sends the command again.
    """
    workers = pipelines.workers
    monkeypatch.setattr(supervisor_link, "ACK_SECONDS", 0.0)
    async with workers.worker():
        first = await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        base = (await pipelines.tasks(first))[-1].snapshot
        for n in range(5):
            await workers.ended(await pipelines.submit(adds(f"three {n}"), adds("four"), base=base), Status.SUCCEEDED)
            assert await pipelines.content(f"three {n}") == f"one\ntwo\nthree {n}\n"
