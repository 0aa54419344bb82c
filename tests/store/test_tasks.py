"""Tasks of a pipeline in the store: written only under the lease, with their events."""

from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import NotFound
from holdfast.model import Lease, Status, TaskStatus
from holdfast.store.retention import Retention
from holdfast.store.tasks import PlannedTask
from tests.store.test_snapshots import built, name
from tests.support.store_harness import TTL, StoreHarness

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


async def leased(harness: StoreHarness) -> Lease:
    await harness.submit(**PIPELINE)
    (lease,) = await harness.claim_process()
    return lease


async def statuses(harness: StoreHarness, lease: Lease) -> list[str]:
    return [
        f"{task.name} {task.status}{' cached' if task.cached else ''}"
        for task in await harness.store.tasks.list(lease.id)
    ]


async def task_events(harness: StoreHarness, lease: Lease) -> list[tuple[str | None, Any]]:
    return [(event.task, event.data) for event in await harness.events(lease) if event.type == "task"]


async def test_waiting_pipeline_shows_its_tasks_from_its_spec(harness: StoreHarness) -> None:
    """Proves P1."""
    job = await harness.submit(**PIPELINE)
    assert job.spec["tasks"][0] == {"name": "a", "command": ["true"]}
    tasks = await harness.store.tasks.list(job.id)
    assert [(task.n, task.name, task.status, task.snapshot) for task in tasks] == [
        (n, text, TaskStatus.PENDING, None) for n, text in enumerate("abc")
    ]
    assert await harness.store.tasks.list((await harness.submit()).id) == []
    with pytest.raises(NotFound):
        await harness.store.tasks.list(job.id, tenant="blue")


async def test_tasks_run_in_order_with_events(harness: StoreHarness) -> None:
    """Proves P1, P4."""
    lease = await leased(harness)
    tasks = harness.store.tasks
    assert await tasks.replan(lease, planned("a", "b", "c"), done=1)
    assert await statuses(harness, lease) == ["a succeeded cached", "b pending", "c pending"]
    await harness.advance(1)
    began = harness.clock.now()
    assert await tasks.write(lease, 1, TaskStatus.RUNNING)
    assert await tasks.write(lease, 1, TaskStatus.RUNNING), "idempotent"
    await harness.advance(1)
    assert await tasks.write(lease, 1, TaskStatus.FAILED, exit_code=3)
    assert await statuses(harness, lease) == ["a succeeded cached", "b failed", "c pending"]
    one = (await tasks.list(lease.id))[1]
    assert (one.started_at, one.ended_at, one.exit_code) == (began, harness.clock.now(), 3)
    assert await task_events(harness, lease) == [
        (None, {"plan": name("c"), "tasks": ["a", "b", "c"]}),
        ("a", {"status": "succeeded", "cached": True, "snapshot": name("a")}),
        ("b", {"status": "running"}),
        ("b", {"status": "failed", "exit_code": 3}),
    ]
    seqs = [event.seq for event in await harness.events(lease)]
    assert seqs == list(range(1, len(seqs) + 1))


async def test_end_of_a_task_is_when_it_ended_and_not_before_it_began(harness: StoreHarness) -> None:
    """Proves P1: the write may come much later."""
    lease = await leased(harness)
    tasks = harness.store.tasks
    await tasks.replan(lease, planned("a", "b", "c"), done=0)
    began = harness.clock.now()
    for n in range(2):
        await tasks.write(lease, n, TaskStatus.RUNNING)
    await harness.advance(10)
    for n, ago in enumerate((2.5, 60.0)):
        await tasks.write(lease, n, TaskStatus.SUCCEEDED, exit_code=0, ago=ago)
    first, second, _ = await tasks.list(lease.id)
    assert (first.started_at, first.ended_at) == (began, began + timedelta(seconds=7.5))
    assert (second.started_at, second.ended_at) == (began, began)


async def test_lease_that_was_lost_changes_no_task(harness: StoreHarness) -> None:
    """Proves L4, P2."""
    old = await leased(harness)
    await harness.store.tasks.replan(old, planned("a", "b", "c"), done=0)
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    assert not await harness.store.tasks.write(old, 0, TaskStatus.SUCCEEDED)
    (adopter,) = await harness.adopt()
    assert not await harness.store.tasks.write(old, 0, TaskStatus.SUCCEEDED)
    assert not await harness.store.tasks.replan(old, planned("x"), done=1)
    assert await statuses(harness, adopter) == ["a pending", "b pending", "c pending"]
    assert await harness.store.tasks.write(adopter, 0, TaskStatus.RUNNING)


async def test_drift_replaces_the_plan_in_one_transaction(harness: StoreHarness) -> None:
    """Proves P9."""
    lease = await leased(harness)
    tasks = harness.store.tasks
    await tasks.replan(lease, planned("a", "b", "c"), done=0)
    for n in range(2):
        await tasks.write(lease, n, TaskStatus.RUNNING)
        await tasks.write(lease, n, TaskStatus.SUCCEEDED, exit_code=0)
    before = await tasks.list(lease.id)
    seq = (await harness.get(lease)).last_seq
    assert await tasks.replan(lease, planned("a", "b", "c"), done=2), "the same plan"
    assert await tasks.list(lease.id) == before
    assert (await harness.get(lease)).last_seq == seq
    assert await tasks.replan(lease, planned("a", "b2", "c2"), done=1)
    assert await statuses(harness, lease) == ["a succeeded", "b pending", "c pending"]
    after = await tasks.list(lease.id)
    assert after[0] == before[0], "what this job ran keeps its times"
    assert [task.snapshot for task in after] == [name("a"), name("b2"), name("c2")]
    assert (await task_events(harness, lease))[-1] == (
        None,
        {"plan": name("c2"), "tasks": ["a", "b", "c"], "replanned": True},
    )


async def test_lost_workspace_resets_the_tasks_after_its_snapshot(harness: StoreHarness) -> None:
    """Proves P2."""
    lease = await leased(harness)
    tasks = harness.store.tasks
    await tasks.replan(lease, planned("a", "b", "c"), done=0)
    for n in range(3):
        await tasks.write(lease, n, TaskStatus.SUCCEEDED, exit_code=0)
    await tasks.replan(lease, planned("a", "b", "c"), done=1)
    assert await statuses(harness, lease) == ["a succeeded", "b pending", "c pending"]
    assert (await tasks.list(lease.id))[1].exit_code is None


async def test_planning_uses_the_snapshots_of_the_plan(harness: StoreHarness) -> None:
    """Proves P11."""
    made = await built(harness, "a")
    lease = await leased(harness)
    await harness.advance(10)
    await harness.store.tasks.replan(lease, planned("a", "b", "c"), done=1)
    assert (await harness.store.snapshots.get(made.id, tenant="default")).used_at == harness.clock.now()


async def test_tasks_go_with_their_job(harness: StoreHarness) -> None:
    """Proves P12."""
    first, second = await leased(harness), await leased(harness)
    for lease in (first, second):
        await harness.store.tasks.replan(lease, planned("a", "b", "c"), done=0)
        await harness.finish(lease)
    await harness.store.jobs.delete(first.id)
    assert await harness.store.database.read("list_tasks", id=first.id) == []
    await harness.advance(100)
    await harness.store.pruning.prune(Retention(ages={Status.SUCCEEDED: 1}, grace=0))
    assert await harness.store.database.read("list_tasks", id=second.id) == []
