"""Why a job is not running: one case per gate, and the reasons of queue and workers."""

from collections.abc import Sequence
from typing import Any

from holdfast.model import Cause, Job, Lease, Outcome, TaskStatus
from holdfast.response_types import Reason
from holdfast.store.tasks import PlannedTask
from tests.support.store_harness import TTL, StoreHarness


async def reasons(harness: StoreHarness, job: Job) -> Sequence[Reason]:
    return (await harness.store.explain.job(job.id)).reasons


async def worker(
    harness: StoreHarness, name: str = "w1", *, queues: dict[str, int] | None = None, function: str = "f"
) -> None:
    await harness.store.workers.register(
        name,
        host="host-a",
        pid=1,
        queues=queues or {"default": 1},
        capabilities=[f"function:{function}"],
        domains=["host-a"],
        ttl=TTL,
    )


async def test_claimable_job_with_a_free_worker_has_no_reason_to_wait(harness: StoreHarness) -> None:
    """Proves J17."""
    await worker(harness)
    assert await reasons(harness, await harness.submit()) == ()


async def test_no_live_worker(harness: StoreHarness) -> None:
    """Proves J17."""
    job = await harness.submit()
    (reason,) = await reasons(harness, job)
    assert reason == Reason(about="worker", message="no live worker: start one with `holdfast worker`")
    await worker(harness)
    await harness.store.workers.drain("w1")
    assert await reasons(harness, job) == (reason,)
    await worker(harness, "w2")
    assert await reasons(harness, job) == ()
    await harness.advance(TTL + 1)
    assert await reasons(harness, job) == (reason,)


async def test_no_worker_for_the_queue_or_the_function(harness: StoreHarness) -> None:
    """Proves J17."""
    await worker(harness, queues={"other": 1})
    job = await harness.submit()
    (reason,) = await reasons(harness, job)
    assert reason == Reason(about="worker", message="no live worker serves queue default", workers=("w1",))
    await worker(harness, "w2", function="g")
    (reason,) = await reasons(harness, job)
    assert (reason.message, reason.workers) == ("no live worker of queue default can run function:f", ("w2",))


async def test_an_engine_that_is_away_is_named(harness: StoreHarness) -> None:
    """Proves J17, R5."""
    why = "cannot reach the Docker engine at unix:///run/docker.sock"
    for name, away in (("w1", {"docker": why}), ("w2", {})):
        await harness.store.workers.register(
            name, host=name, pid=1, queues={"default": 1}, capabilities=["process"], domains=[], ttl=TTL, away=away
        )
    job = await harness.submit(runner="docker", spec={"image": "busybox"})
    (reason,) = await reasons(harness, job)
    assert reason.message == f"no live worker of queue default can run docker; w1: {why}"
    assert [(worker.worker, worker.away) for worker in await harness.store.workers.list()] == [
        ("w1", {"docker": why}),
        ("w2", {}),
    ]


async def test_all_slots_taken(harness: StoreHarness) -> None:
    """Proves J17."""
    await worker(harness)
    await harness.submit()
    await harness.claim(1)
    (reason,) = await reasons(harness, await harness.submit())
    assert (reason.about, reason.message, reason.workers) == ("worker", "all slots are taken: w1", ("w1",))


async def test_all_reasons_to_wait_are_listed_together(harness: StoreHarness) -> None:
    """Proves J17."""
    await worker(harness)
    parent = await harness.submit(queue="slow")
    job = await harness.submit(hold=True, needs=[parent.id], available_at=harness.later(60).isoformat())
    found = await reasons(harness, job)
    assert [reason.about for reason in found] == ["held", "needs", "due"]
    assert found[1] == Reason(about="needs", message=f"needs job {parent.id}, which is queued", jobs=(parent.id,))
    assert found[2].message == f"not due until {harness.later(60).isoformat()}"


async def test_retry_says_when_its_next_attempt_comes(harness: StoreHarness) -> None:
    """Proves J17."""
    await worker(harness)
    job = await harness.submit(max_attempts=2)
    (lease,) = await harness.claim()
    await harness.finish(lease, Outcome.requeued(Cause.EXIT, delay=30))
    (reason,) = await reasons(harness, job)
    assert (reason.about, reason.message) == ("due", f"attempt 2 waits until {harness.later(30).isoformat()}")


async def test_lane_head_blocker_and_pause(harness: StoreHarness) -> None:
    """Proves J17."""
    await worker(harness, queues={"default": 9})
    head = await harness.submit(lane="L")
    later = await harness.submit(lane="L")
    (reason,) = await reasons(harness, later)
    assert reason == Reason(about="lane", message=f"lane L: job {head.id} goes first and is queued", jobs=(head.id,))
    (lease,) = await harness.claim()
    await harness.fail(lease)
    (reason,) = await reasons(harness, later)
    blocked = f"lane L is blocked by job {head.id}, which is failed; resume, resolve or dismiss it"
    assert reason == Reason(about="lane", message=blocked, jobs=(head.id,))
    await harness.store.lanes.pause("L")
    (reason,) = await reasons(harness, later)
    assert reason.message == "lane L is paused; resume it"


async def test_queue_paused_or_at_its_cap(harness: StoreHarness) -> None:
    """Proves J17."""
    await worker(harness, queues={"default": 9})
    await harness.store.queues.limit("default", cap=1)
    await harness.submit()
    await harness.claim()
    job = await harness.submit()
    (reason,) = await reasons(harness, job)
    assert reason == Reason(about="queue", message="queue default is at its cap: 1 of 1 run")
    await harness.store.queues.pause("default")
    (reason,) = await reasons(harness, job)
    assert reason == Reason(about="queue", message="queue default is paused; resume it")


async def running(harness: StoreHarness, **fields: Any) -> tuple[Job, Lease]:
    """A process that worker w1 claimed and started in host-a."""
    await worker(harness)
    job = await harness.submit(runner="process", spec={"command": ["x"]}, **fields)
    (lease,) = await harness.claim_process()
    await harness.store.leases.start([lease])
    return job, lease


async def test_running_job_tells_how_fresh_its_heartbeat_is(harness: StoreHarness) -> None:
    """Proves J17."""
    job, lease = await running(harness)
    (reason,) = await reasons(harness, job)
    assert (reason.message, reason.workers) == ("attempt 1 runs on worker w1; last heartbeat 0 s ago", ("w1",))
    await harness.advance(TTL / 3)
    (reason,) = await reasons(harness, job)
    assert reason.message == "attempt 1 runs on worker w1; last heartbeat 20 s ago"
    await harness.store.leases.beat("w1", [lease], ttl=TTL)
    (reason,) = await reasons(harness, job)
    assert reason.message == "attempt 1 runs on worker w1; last heartbeat 0 s ago"


async def test_worker_without_heartbeats_is_not_reported_as_running_its_job(harness: StoreHarness) -> None:
    """Proves J17."""
    job, _ = await running(harness)
    nobody = "no live worker reaches host-a: start one there"
    await harness.advance(TTL / 2 + 10)
    (reason,) = await reasons(harness, job)
    silent = "worker w1 has sent no heartbeat for 40 s; attempt 1 can be adopted when its lease expires, in 20 s"
    assert (reason.about, reason.message) == ("worker", f"{silent}, but {nobody}")
    await harness.advance(TTL / 2)
    (reason,) = await reasons(harness, job)
    expired = "the lease of worker w1 expired 10 s ago, after 70 s without a heartbeat; attempt 1 waits to be adopted"
    assert (reason.about, reason.message) == ("worker", f"{expired}, but {nobody}")
    await worker(harness, "w2")
    (reason,) = await reasons(harness, job)
    assert (reason.message, reason.workers) == (expired, ("w2",))
    await harness.store.leases.reap()
    (reason,) = await reasons(harness, job)
    lost = "worker w1 was lost, its lease expired; attempt 1 waits in host-a to be adopted"
    assert (reason.message, reason.workers) == (lost, ("w2",))


async def test_worker_that_stopped_is_not_reported_as_lost(harness: StoreHarness) -> None:
    """Proves J17."""
    job, lease = await running(harness)
    await harness.store.leases.hand_over([lease])
    await harness.store.workers.delete("w1")
    (reason,) = await reasons(harness, job)
    handed = "worker w1 stopped and handed attempt 1 over, which waits in host-a to be adopted"
    assert reason.message == f"{handed}, but no live worker reaches host-a: start one there"
    await worker(harness, "w2")
    (reason,) = await reasons(harness, job)
    assert (reason.message, reason.workers) == (handed, ("w2",))
    await harness.store.workers.drain("w2")
    (reason,) = await reasons(harness, job)
    assert (reason.message, reason.workers) == (f"{handed}, but no live worker reaches host-a: start one there", ())


async def test_dead_worker_and_missing_engine_are_different_reasons(harness: StoreHarness) -> None:
    """Proves J17."""
    job, lease = await running(harness)
    await worker(harness, "w2")
    await harness.store.leases.hand_over([lease], delay=5, reason="engine_unreachable")
    (reason,) = await reasons(harness, job)
    wanted = "worker w1 cannot reach the engine of attempt 1 and handed it over; it waits in host-a to be adopted"
    assert reason.message == f"{wanted}, not before {harness.later(5).isoformat()}"
    await harness.advance(6)
    (lease,) = await harness.adopt(worker="w2")
    await worker(harness, "w3")
    await harness.store.leases.orphan("w2")
    (reason,) = await reasons(harness, job)
    assert reason.message.startswith("worker w2 died; attempt 1 waits in host-a to be adopted")


async def test_orphaned_paused_and_ended_functions(harness: StoreHarness) -> None:
    """Proves J17."""
    job = await harness.submit()
    await harness.claim()
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    (reason,) = await reasons(harness, job)
    lost = "worker w1 was lost, its lease expired; attempt 1 ended with it, which the next live worker records"
    assert reason.message == f"{lost}, but there is no live worker: start one with `holdfast worker`"
    await worker(harness, "w2")
    (reason,) = await reasons(harness, job)
    assert (reason.message, reason.workers) == (lost, ("w2",))
    (lease,) = await harness.adopt()
    await harness.fail(lease, "boom")
    (reason,) = await reasons(harness, job)
    assert reason.message == "it is failed: exit_nonzero, boom; it has ended"


async def test_pipeline_that_waits_for_a_builder_names_it(harness: StoreHarness) -> None:
    """Proves J17, P5: what counts is the next result that it keeps, and who holds that one's lock by a lease."""
    fields = {"runner": "process", "spec": {}, "tasks": [{"name": name, "command": ["true"]} for name in "ab"]}
    jobs = [await harness.submit(**fields, snapshot=mode) for mode in ("always", "final", "none")]
    leases = {lease.id: lease for lease in await harness.claim_process()}
    builder, final, none = (leases[job.id] for job in jobs)
    plan = [PlannedTask(name=name, parent="0" * 64, snapshot=name * 64) for name in "ab"]
    for lease in (builder, final, none):
        assert await harness.store.tasks.replan(lease, plan, done=0)
    await harness.store.snapshots.take(builder, "a" * 64)
    for job in jobs:
        assert [reason.about for reason in await reasons(harness, job)] == ["status"]
    await harness.store.snapshots.take(builder, "b" * 64)
    for job, waits in zip(jobs, (False, True, False), strict=True):
        assert [reason.about for reason in await reasons(harness, job)] == ["status", "build"][: 1 + waits]
    reason = (await reasons(harness, jobs[1]))[1]
    assert reason.message == f"task b waits for job {builder.id}, which builds its snapshot"
    assert reason.jobs == (builder.id,)
    await harness.store.tasks.write(final, 0, TaskStatus.RUNNING)
    assert [reason.about for reason in await reasons(harness, jobs[1])] == ["status"]
    await harness.store.tasks.write(final, 0, TaskStatus.PENDING)
    await harness.fail(builder, "boom")
    assert [reason.about for reason in await reasons(harness, jobs[1])] == ["status"], "a lock falls with its lease"
