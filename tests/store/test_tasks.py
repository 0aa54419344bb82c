"""Tasks of a pipeline in the store: planned and moved by the lease alone, with the events that tell it."""

from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import NotFound
from holdfast.model import Lease, Status, TaskStatus
from holdfast.store.retention import Retention
from holdfast.store.tasks import PlannedTask
from tests.store.test_snapshots import built, name
from tests.support.store_fixture import TTL, Stage

PIPELINE: dict[str, Any] = {
    "runner": "process",
    "spec": {},
    "tasks": [{"name": text, "command": ["true"]} for text in "abc"],
}


def planned(*texts: str) -> list[PlannedTask]:
    parents = ["root", *texts]
    return [
        PlannedTask(name=text[0], parent=name(before), snapshot=name(text))
        for before, text in zip(parents, texts, strict=False)
    ]


async def leased(stage: Stage) -> Lease:
    await stage.submit(**PIPELINE)
    (lease,) = await stage.claim_process()
    return lease


async def statuses(stage: Stage, lease: Lease) -> list[str]:
    return [
        f"{task.name} {task.status}{' cached' if task.cached else ''}"
        for task in await stage.store.tasks.list(lease.id)
    ]


async def told(stage: Stage, lease: Lease) -> list[tuple[str | None, Any]]:
    return [(event.task, event.data) for event in await stage.events(lease) if event.type == "task"]


async def test_waiting_pipeline_shows_its_tasks_from_its_spec(stage: Stage) -> None:
    """Proves P1."""
    job = await stage.submit(**PIPELINE)
    assert job.spec["tasks"][0] == {"name": "a", "command": ["true"]}
    tasks = await stage.store.tasks.list(job.id)
    assert [(task.n, task.name, task.status, task.snapshot) for task in tasks] == [
        (n, text, TaskStatus.PENDING, None) for n, text in enumerate("abc")
    ]
    assert await stage.store.tasks.list((await stage.submit()).id) == []
    with pytest.raises(NotFound):
        await stage.store.tasks.list(job.id, tenant="blue")


async def test_tasks_run_in_order_and_tell_it(stage: Stage) -> None:
    """Proves P1, P4."""
    lease = await leased(stage)
    tasks = stage.store.tasks
    assert await tasks.replan(lease, planned("a", "b", "c"), done=1)
    assert await statuses(stage, lease) == ["a succeeded cached", "b pending", "c pending"]
    await stage.advance(1)
    began = stage.clock.now()
    assert await tasks.write(lease, 1, TaskStatus.RUNNING)
    assert await tasks.write(lease, 1, TaskStatus.RUNNING), "idempotent"
    await stage.advance(1)
    assert await tasks.write(lease, 1, TaskStatus.FAILED, exit_code=3)
    assert await statuses(stage, lease) == ["a succeeded cached", "b failed", "c pending"]
    one = (await tasks.list(lease.id))[1]
    assert (one.started_at, one.ended_at, one.exit_code) == (began, stage.clock.now(), 3)
    assert await told(stage, lease) == [
        (None, {"plan": name("c"), "tasks": ["a", "b", "c"]}),
        ("a", {"status": "succeeded", "cached": True, "snapshot": name("a")}),
        ("b", {"status": "running"}),
        ("b", {"status": "failed", "exit_code": 3}),
    ]
    seqs = [event.seq for event in await stage.events(lease)]
    assert seqs == list(range(1, len(seqs) + 1))


async def test_end_of_a_task_is_when_it_ended_and_not_before_it_began(stage: Stage) -> None:
    """Proves P1: the write may come much later."""
    lease = await leased(stage)
    tasks = stage.store.tasks
    await tasks.replan(lease, planned("a", "b", "c"), done=0)
    began = stage.clock.now()
    for n in range(2):
        await tasks.write(lease, n, TaskStatus.RUNNING)
    await stage.advance(10)
    for n, ago in enumerate((2.5, 60.0)):
        await tasks.write(lease, n, TaskStatus.SUCCEEDED, exit_code=0, ago=ago)
    first, second, _ = await tasks.list(lease.id)
    assert (first.started_at, first.ended_at) == (began, began + timedelta(seconds=7.5))
    assert (second.started_at, second.ended_at) == (began, began)


async def test_lease_that_was_lost_changes_no_task(stage: Stage) -> None:
    """Proves L4, P2."""
    old = await leased(stage)
    await stage.store.tasks.replan(old, planned("a", "b", "c"), done=0)
    await stage.advance(TTL + 1)
    await stage.store.leases.reap()
    assert not await stage.store.tasks.write(old, 0, TaskStatus.SUCCEEDED)
    (adopter,) = await stage.adopt()
    assert not await stage.store.tasks.write(old, 0, TaskStatus.SUCCEEDED)
    assert not await stage.store.tasks.replan(old, planned("x"), done=1)
    assert await statuses(stage, adopter) == ["a pending", "b pending", "c pending"]
    assert await stage.store.tasks.write(adopter, 0, TaskStatus.RUNNING)


async def test_drift_replaces_the_plan_in_one_transaction(stage: Stage) -> None:
    """Proves P9."""
    lease = await leased(stage)
    tasks = stage.store.tasks
    await tasks.replan(lease, planned("a", "b", "c"), done=0)
    for n in range(2):
        await tasks.write(lease, n, TaskStatus.RUNNING)
        await tasks.write(lease, n, TaskStatus.SUCCEEDED, exit_code=0)
    before = await tasks.list(lease.id)
    seq = (await stage.get(lease)).last_seq
    assert await tasks.replan(lease, planned("a", "b", "c"), done=2), "the same plan"
    assert await tasks.list(lease.id) == before
    assert (await stage.get(lease)).last_seq == seq
    assert await tasks.replan(lease, planned("a", "b2", "c2"), done=1)
    assert await statuses(stage, lease) == ["a succeeded", "b pending", "c pending"]
    after = await tasks.list(lease.id)
    assert after[0] == before[0], "what this job ran keeps its times"
    assert [task.snapshot for task in after] == [name("a"), name("b2"), name("c2")]
    assert (await told(stage, lease))[-1] == (
        None,
        {"plan": name("c2"), "tasks": ["a", "b", "c"], "replanned": True},
    )


async def test_lost_workspace_puts_tasks_behind_the_snapshot_back(stage: Stage) -> None:
    """Proves P2."""
    lease = await leased(stage)
    tasks = stage.store.tasks
    await tasks.replan(lease, planned("a", "b", "c"), done=0)
    for n in range(3):
        await tasks.write(lease, n, TaskStatus.SUCCEEDED, exit_code=0)
    await tasks.replan(lease, planned("a", "b", "c"), done=1)
    assert await statuses(stage, lease) == ["a succeeded", "b pending", "c pending"]
    assert (await tasks.list(lease.id))[1].exit_code is None


async def test_planning_uses_the_snapshots_of_the_plan(stage: Stage) -> None:
    """Proves P11."""
    made = await built(stage, "a")
    lease = await leased(stage)
    await stage.advance(10)
    await stage.store.tasks.replan(lease, planned("a", "b", "c"), done=1)
    assert (await stage.store.snapshots.get(made.id, tenant="default")).used_at == stage.clock.now()


async def test_tasks_go_with_their_job(stage: Stage) -> None:
    """Proves P12."""
    first, second = await leased(stage), await leased(stage)
    for lease in (first, second):
        await stage.store.tasks.replan(lease, planned("a", "b", "c"), done=0)
        await stage.finish(lease)
    await stage.store.jobs.delete(first.id)
    assert await stage.store.database.read("list_tasks", id=first.id) == []
    await stage.advance(100)
    await stage.store.retain.prune(Retention(ages={Status.SUCCEEDED: 1}, grace=0))
    assert await stage.store.database.read("list_tasks", id=second.id) == []
