"""Pipelines of processes, with a real worker: order, cache, locks, failures, stops, plans that change."""

from pathlib import Path

import pytest

from holdfast.model import Status
from tests.pipelines import Pipes, adds, task
from tests.rig import Rig, eventually

pytestmark = pytest.mark.asyncio


@pytest.fixture
def pipes(rig: Rig, tmp_path: Path) -> Pipes:
    return Pipes(rig, tmp_path)


async def test_tasks_run_in_order_in_one_workspace(pipes: Pipes) -> None:
    """Proves P1, P7, E7."""
    rig = pipes.rig
    async with rig.worker():
        job = await rig.ended(await pipes.submit(adds("one"), adds("two"), adds("three")), Status.SUCCEEDED)
    assert pipes.ran() == ["one", "two", "three"]
    assert (job.attempts, job.exit_code) == (1, 0)
    told = [(event.task, event.data["status"]) for event in await rig.events(job, "task") if "status" in event.data]
    assert told == [(name, status) for name in ("one", "two", "three") for status in ("running", "succeeded")]
    lines = [(event.task, line) for event in await rig.events(job, "log") for line in event.data["lines"]]
    assert lines == [
        ("one", "one"),
        *(("two", w) for w in ("one", "two")),
        *(("three", w) for w in ("one", "two", "three")),
    ]
    records = await pipes.tasks(job)
    assert [(record.name, record.status, record.exit_code) for record in records] == [
        (name, "succeeded", 0) for name in ("one", "two", "three")
    ]
    for record in records:
        assert record.started_at is not None
        assert record.ended_at is not None
        assert record.started_at <= record.ended_at
    assert {record.snapshot for record in records} == {snapshot.id for snapshot in await pipes.snapshots()}
    assert await pipes.content("three") == "one\ntwo\nthree\n"
    assert rig.folders == []


async def test_second_job_starts_nothing(pipes: Pipes) -> None:
    """Proves P4."""
    rig = pipes.rig
    async with rig.worker():
        await rig.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
        again = await rig.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    assert pipes.ran() == ["one", "two"]
    assert await pipes.statuses(again) == ["cached", "cached"]
    assert again.attempts == 0
    assert len(await pipes.snapshots()) == 2
