"""A function dies with its worker: the first process that learns of it settles the attempt, and the job runs again."""

from typing import Any

from holdfast.assemble_service import duties_of
from holdfast.duties import orphan_settler
from holdfast.model import Cause, Claimable, Error, Job, Lease, Outcome, Status
from holdfast.store import Store
from tests.support.in_process_workers import eventually
from tests.support.store_harness import StoreHarness
from tests.support.worker_processes import WorkerProcesses

NAP = {"runner": "function", "spec": {"name": "nap"}}
WAITS: dict[str, Any] = {"base": 3600, "cap": 3600, "on": ["failed"]}
"""A backoff that no test outlives."""


async def _started(processes: WorkerProcesses, **fields: Any) -> Job:
    """Submit a function and wait until it runs."""
    job = await processes.submit(
        "nap", inputs={"path": processes.marker("nap"), "seconds": 600}, max_attempts=2, retry=WAITS, **fields
    )
    await processes.wait_for_marker("nap")
    return job


async def test_lost_function_runs_again_at_once_on_the_killed_workers_host(processes: WorkerProcesses) -> None:
    killed = processes.start({"default": 1})
    job = await _started(processes)
    processes.start({"default": 1})
    killed.kill()
    await processes.wait_for_marker("nap", 2)
    first, _ = await processes.store.attempts.list(job.id)
    assert first.cause is Cause.LOST


async def test_lost_function_runs_again_at_the_reap_on_another_host(processes: WorkerProcesses) -> None:
    """The killed worker led the duties, and its host stays away."""
    killed = processes.start({"default": 1}, host="killed")
    job = await _started(processes)
    processes.start({"default": 1}, host="other")
    killed.kill()
    await processes.wait_for_marker("nap", 2)
    first, _ = await processes.store.attempts.list(job.id)
    assert first.cause is Cause.LOST
    assert "reaped" in await processes.leases(job)


async def test_lost_function_is_settled_at_the_reap_without_any_worker(processes: WorkerProcesses) -> None:
    """Only a server is left, which runs the duties."""
    killed = processes.start({"default": 1}, host="killed")
    job = await _started(processes)
    killed.kill()
    async with duties_of(processes.settings)(processes.store):

        async def requeued() -> Job | None:
            found = await processes.get(job)
            return found if found.status is Status.QUEUED else None

        assert (await eventually(requeued, "the duties settle it")).gate == "open"
    (first,) = await processes.store.attempts.list(job.id)
    assert first.cause is Cause.LOST


async def _claimed(store: Store, **fields: Any) -> Lease:
    await store.jobs.submit({**NAP, **fields})
    nap = Claimable(queue="default", capability="function:nap", domain="function")
    (lease,) = (await store.leases.claim("gone", [nap], slots=1, ttl=60)).claimed
    await store.leases.start([lease])
    return lease


async def test_only_the_first_loss_of_a_job_skips_the_backoff(harness: StoreHarness) -> None:
    """An attempt that failed before it is not a loss; drained attempts are none either."""
    store = harness.store
    failed = Outcome.requeued(Cause.EXIT, error=Error(code="function_error", message="no"))
    lease = await _claimed(store, max_attempts=9, retry=WAITS)
    await store.leases.finish([(lease, failed)])
    nap = Claimable(queue="default", capability="function:nap", domain="function")
    (lease,) = (await store.leases.claim("gone", [nap], slots=1, ttl=60)).claimed
    await store.leases.start([lease])
    await store.leases.orphan("gone")
    assert await orphan_settler.settle_functions(store) == 1
    (lease,) = (await store.leases.claim("gone", [nap], slots=1, ttl=60)).claimed
    await store.leases.start([lease])
    await store.leases.orphan("gone")
    assert await orphan_settler.settle_functions(store) == 1
    job = await store.jobs.get(lease.id)
    assert (job.status, job.gate) == (Status.QUEUED, "future")
    causes = [attempt.cause for attempt in await store.attempts.list(job.id)]
    assert causes == [Cause.EXIT, Cause.LOST, Cause.LOST]


async def test_stop_request_decides_how_an_orphaned_function_ends(harness: StoreHarness) -> None:
    store = harness.store
    cancelled = await _claimed(store)
    await store.jobs.cancel(cancelled.id)
    interrupted = await _claimed(store)
    await store.jobs.interrupt(interrupted.id)
    lost = await _claimed(store, max_attempts=1)
    await store.leases.orphan("gone")
    assert await orphan_settler.settle_functions(store) == 3
    ends = [(await store.jobs.get(lease.id)).status for lease in (cancelled, interrupted, lost)]
    assert ends == [Status.CANCELLED, Status.PAUSED, Status.FAILED]
    assert await orphan_settler.settle_functions(store) == 0
    assert store.counters.losses == 1
