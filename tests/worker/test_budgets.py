"""Budgets: a job over its budget never succeeds, and is resumed only with a higher budget."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast import AsyncClient
from holdfast.client.http import Refused
from holdfast.errors import Conflict
from holdfast.model import Cause, Error, Job, Lease, NewEvent, Outcome, Status
from holdfast.runner.function import Context
from holdfast.store import open_store
from holdfast.timing import ManualClock
from tests.support.in_process_workers import InProcessWorkers
from tests.support.pipelines import Pipelines, task
from tests.support.service import Service, error_of
from tests.support.store_harness import START, StoreHarness
from tests.support.worker_processes import WorkerProcesses

pytestmark = pytest.mark.asyncio

OVER = "budget_exceeded"
RETRIED = Outcome.requeued(Cause.EXIT, error=Error(code="exit_nonzero", message="exit code 3"))


def usage_line(tokens: float) -> str:
    return f"""echo '{{"event":"usage","tokens":{tokens}}}'"""


async def use(harness: StoreHarness, lease: Lease, batch: int = 1, /, **deltas: float) -> None:
    """Report usage of a claimed job, as its worker does."""
    event = NewEvent(type="usage", data=deltas)
    appended = await harness.store.events.append(
        lease, batch, [event], offsets=(0, 0), old_offsets=(0, 0), usage=deltas
    )
    assert appended.answer == "landed"


async def spent(harness: StoreHarness, used: Mapping[str, float], /, **fields: object) -> Job:
    """A job that failed with this usage."""
    job = await harness.submit(**fields)
    (lease,) = await harness.claim()
    await use(harness, lease, **used)
    await harness.fail(lease)
    return job


def error_code(job: Job) -> tuple[str, str | None]:
    return job.status, None if job.error is None else job.error.code


# The record


@pytest.mark.parametrize("lane", [None, "L"])
async def test_success_over_the_budget_is_a_failure(harness: StoreHarness, lane: str | None) -> None:
    """Proves H5."""
    job = await harness.submit(budget={"tokens": 100}, max_attempts=5, lane=lane)
    dependant = await harness.submit(needs=[job.id])
    (lease,) = await harness.claim()
    await use(harness, lease, tokens=120)
    assert await harness.finish(lease, Outcome.succeeded({"text": "done"})) is Status.FAILED
    ended = await harness.get(job)
    assert error_code(ended) == (Status.FAILED, OVER)
    assert ended.error is not None
    assert (ended.error.message, ended.result, ended.attempts) == ("used 120 tokens of 100", None, 1)
    (attempt,) = await harness.store.attempts.list(job.id)
    assert (attempt.cause, attempt.error) == (Cause.EXIT, ended.error)
    last = (await harness.events(job))[-1].data
    assert (last["status"], last["code"], last["message"]) == ("failed", OVER, ended.error.message)
    assert error_code(await harness.get(dependant)) == (Status.FAILED, "dependency_failed")
    assert await harness.claim() == []
    if lane is not None:
        assert (await harness.store.lanes.get(lane)).blockers == (job.id,)


@pytest.mark.parametrize(
    "outcome",
    [
        RETRIED,
        Outcome.requeued(Cause.DRAINED),
        Outcome.requeued(Cause.LOST, error=Error(code="lost", message="gone")),
        Outcome.failed("exit_nonzero", "exit code 3", exit_code=3),
    ],
    ids=["retried", "drained", "lost", "failed"],
)
async def test_over_the_budget_no_other_attempt_follows(harness: StoreHarness, outcome: Outcome) -> None:
    """Proves H5."""
    job = await harness.submit(budget={"tokens": 100}, max_attempts=5)
    (lease,) = await harness.claim()
    await use(harness, lease, tokens=120)
    assert await harness.finish(lease, outcome) is Status.FAILED
    ended = await harness.get(job)
    assert error_code(ended) == (Status.FAILED, OVER)
    assert ended.error is not None
    assert ended.error.message.startswith("used 120 tokens of 100")
    if outcome.error is not None:
        assert outcome.error.message in ended.error.message
    assert ended.exit_code == outcome.exit_code


async def test_stop_or_timeout_keeps_its_outcome_over_budget(harness: StoreHarness) -> None:
    """Proves H5."""
    timed_out = Outcome(status=Status.TIMED_OUT, cause=Cause.TIMED_OUT, error=Error(code="timed_out", message="late"))
    wanted = {"cancel": Status.CANCELLED, "interrupt": Status.PAUSED, "timeout": Status.TIMED_OUT}
    for stop, status in wanted.items():
        job = await harness.submit(budget={"tokens": 100}, max_attempts=5)
        (lease,) = await harness.claim()
        await use(harness, lease, tokens=120)
        if stop == "cancel":
            await harness.store.jobs.cancel(job.id)
        elif stop == "interrupt":
            await harness.store.jobs.interrupt(job.id)
        assert await harness.finish(lease, timed_out if stop == "timeout" else RETRIED) is status
        with pytest.raises(Conflict, match="120 tokens"):
            await harness.store.jobs.resume(job.id)


async def test_usage_of_all_attempts_is_held_against_the_budget(harness: StoreHarness) -> None:
    """Proves H5, C7."""
    job = await harness.submit(budget={"tokens": 100, "pages": 5}, max_attempts=5)
    for _ in range(2):
        (lease,) = await harness.claim()
        await use(harness, lease, tokens=50, pages=1)
        assert await harness.finish(lease, RETRIED) is Status.QUEUED
    (lease,) = await harness.claim()
    await use(harness, lease, tokens=0.5)
    assert await harness.finish(lease) is Status.FAILED
    ended = await harness.get(job)
    assert ended.error is not None
    assert (ended.error.message, ended.attempts) == ("used 100.5 tokens of 100", 3)


async def test_usage_that_just_fits_is_within_the_budget(harness: StoreHarness) -> None:
    """Proves H5."""
    job = await harness.submit(budget={"dollars": 0.3, "tokens": 7})
    (lease,) = await harness.claim()
    for batch in (1, 2, 3):
        await use(harness, lease, batch, dollars=0.1, unlimited=1e12)
    assert await harness.finish(lease) is Status.SUCCEEDED
    assert (await harness.get(job)).usage == {"dollars": 0.3, "unlimited": 3e12}


async def test_large_numbers_are_written_out(harness: StoreHarness) -> None:
    """Proves H5."""
    job = await spent(harness, {"tokens": 1_234_567}, budget={"tokens": 500_000})
    ended = await harness.get(job)
    assert ended.error is not None
    assert "used 1234567 tokens of 500000" in ended.error.message


async def test_repeated_finish_returns_failed(harness: StoreHarness) -> None:
    """Proves H5."""
    await harness.submit(budget={"tokens": 100})
    (lease,) = await harness.claim()
    await use(harness, lease, tokens=120)
    assert await harness.finish(lease) is Status.FAILED
    assert await harness.finish(lease) is Status.FAILED


async def test_many_finishes_are_each_held_to_their_own_budget(harness: StoreHarness) -> None:
    """Proves H5."""
    jobs = [await harness.submit(budget=None if n % 3 == 0 else {"tokens": 10 * n}, lane=f"L{n % 2}" if n > 4 else None)
            for n in range(7)]  # fmt: skip
    leases = [*await harness.claim(), *await harness.claim()]
    for lease in leases:
        await use(harness, lease, tokens=35)
    answers = await harness.store.leases.finish([(lease, Outcome.succeeded()) for lease in leases])
    over = {job.id for n, job in enumerate(jobs) if n % 3 and 10 * n < 35}
    assert {job_id for job_id, status in answers.items() if status is Status.FAILED} == over
    assert {status for job_id, status in answers.items() if job_id not in over} == {Status.SUCCEEDED}


async def test_stale_worker_cannot_fail_a_job_over_its_budget(harness: StoreHarness) -> None:
    """Proves H5."""
    job = await harness.submit(budget={"tokens": 100})
    (stale,) = await harness.claim()
    await use(harness, stale, tokens=120)
    await harness.store.leases.hand_over([stale])
    (lease,) = await harness.adopt()
    assert await harness.finish(stale) is None
    assert await harness.status(job) is Status.RUNNING
    assert await harness.finish(lease) is Status.FAILED


async def test_loss_of_a_job_over_its_budget_is_settled_as_such(harness: StoreHarness) -> None:
    """Proves H5."""
    job = await harness.submit(runner="process", spec={"command": ["x"]}, budget={"tokens": 100}, max_attempts=5)
    (lease,) = await harness.claim_process()
    await harness.store.leases.start([lease])
    await use(harness, lease, tokens=120)
    await harness.store.leases.orphan("w1")
    (orphan,) = await harness.store.leases.open_in(["host-a"])
    assert await harness.store.leases.lose(orphan) is Status.FAILED
    assert error_code(await harness.get(job)) == (Status.FAILED, OVER)


# Resuming


async def test_resume_with_a_spent_budget_is_refused_and_changes_nothing(harness: StoreHarness) -> None:
    """Proves H5."""
    job = await spent(harness, {"tokens": 120}, budget={"tokens": 100})
    before = await harness.get(job)
    wanted = f"cannot resume job {job.id}: it used 120 tokens of its budget of 100"
    with pytest.raises(Conflict, match=wanted):
        await harness.store.jobs.resume(job.id)
    for too_little in (110, 120):
        with pytest.raises(Conflict, match=f"it used 120 tokens, and its budget would be {too_little}.*above 120"):
            await harness.store.jobs.resume(job.id, budget={"tokens": too_little})
    assert await harness.get(job) == before
    resumed = await harness.store.jobs.resume(job.id, budget={"tokens": 121})
    assert (resumed.status, resumed.policy.budget) == (Status.QUEUED, {"tokens": 121})
    (lease,) = await harness.claim()
    assert await harness.finish(lease) is Status.SUCCEEDED


async def test_budget_that_is_used_up_to_the_last_is_spent(harness: StoreHarness) -> None:
    """Proves H5."""
    job = await spent(harness, {"tokens": 100}, budget={"tokens": 100, "pages": 0})
    with pytest.raises(Conflict, match="it used 100 tokens of its budget of 100"):
        await harness.store.jobs.resume(job.id)
    assert (await harness.store.jobs.resume(job.id, budget={"tokens": 101})).status is Status.QUEUED


async def test_raising_one_limit_keeps_the_others(harness: StoreHarness) -> None:
    """Proves H5."""
    job = await spent(harness, {"tokens": 120, "pages": 9}, budget={"tokens": 100, "pages": 5})
    with pytest.raises(Conflict, match="it used 9 pages of its budget of 5"):
        await harness.store.jobs.resume(job.id, budget={"tokens": 200})
    resumed = await harness.store.jobs.resume(job.id, budget={"tokens": 200, "pages": 10})
    assert resumed.policy.budget == {"tokens": 200, "pages": 10}


async def test_job_within_its_budget_is_resumed_as_it_is(harness: StoreHarness) -> None:
    """Proves H5."""
    job = await spent(harness, {"tokens": 99}, budget={"tokens": 100, "pages": 0})
    resumed = await harness.store.jobs.resume(job.id)
    assert (resumed.status, resumed.policy.budget) == (Status.QUEUED, {"tokens": 100, "pages": 0})


async def test_resume_over_http_and_by_the_client_names_the_way_out(service: Service) -> None:
    """Proves H5."""
    async with service.client() as client, await open_store(service.database_url, listen=False) as store:
        harness = StoreHarness("", service.database_url, store, ManualClock(START))
        job = await spent(harness, {"tokens": 120}, budget={"tokens": 100})
        refused = await client.post(f"/v1/jobs/{job.id}/resume")
        assert (refused.status_code, error_of(refused)["code"]) == (409, "conflict")
        assert "used 120 tokens of its budget of 100" in error_of(refused)["message"]
        assert "--budget tokens=N" in error_of(refused)["message"]
        async with AsyncClient(service.url, token=service.admin) as api:
            with pytest.raises(Refused, match="above 120"):
                await api.resume(job.id)
            raised = await api.resume(job.id, budget={"tokens": 200})
        assert (raised.status, raised.policy.budget) == (Status.QUEUED, {"tokens": 200})


# The runners


async def test_usage_in_the_last_line_of_a_process(workers: InProcessWorkers) -> None:
    """Proves H5."""
    last = await workers.sh(usage_line(120), budget={"tokens": 100}, max_attempts=4)
    unended = await workers.sh("""printf '{"event":"usage","tokens":120}'""", budget={"tokens": 100}, max_attempts=4)
    laned = await workers.sh(usage_line(120), budget={"tokens": 100}, lane="L")
    fits = await workers.sh(usage_line(100), budget={"tokens": 100})
    async with workers.worker():
        for job in (last, unended, laned):
            ended = await workers.ended(job)
            assert error_code(ended) == (Status.FAILED, OVER)
            assert (ended.attempts, ended.exit_code, ended.usage) == (1, 0, {"tokens": 120})
        assert (await workers.ended(fits)).status is Status.SUCCEEDED


async def test_usage_in_the_last_statement_of_a_function(workers: InProcessWorkers) -> None:
    """Proves H5."""

    @workers.functions.add
    async def on_the_loop(ctx: Context) -> str:
        await asyncio.sleep(0)  # Reason: yield once, so that it runs on the loop.
        ctx.usage(tokens=120)
        return "done"

    @workers.functions.add
    def in_a_thread(ctx: Context) -> str:
        ctx.usage(tokens=120)
        return "done"

    @workers.functions.add
    def fails(ctx: Context) -> str:
        ctx.usage(tokens=120)
        raise RuntimeError("no luck")

    names = ("on_the_loop", "in_a_thread", "fails")
    jobs = [await workers.submit(name, budget={"tokens": 100}, max_attempts=4) for name in names]
    async with workers.worker():
        for job in jobs:
            ended = await workers.ended(job)
            assert error_code(ended) == (Status.FAILED, OVER)
            assert (ended.attempts, ended.result, ended.usage) == (1, None, {"tokens": 120})


async def test_usage_in_the_last_line_of_a_container(workers: InProcessWorkers, docker: object) -> None:
    """Proves H5."""
    job = await workers.container(usage_line(120), budget={"tokens": 100}, max_attempts=4)
    async with workers.worker():
        ended = await workers.ended(job)
    assert error_code(ended) == (Status.FAILED, OVER)
    assert (ended.attempts, ended.exit_code, ended.usage) == (1, 0, {"tokens": 120})


async def test_usage_in_the_last_line_of_a_pipeline_and_none_of_its_cached_tasks(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """Proves H5."""
    pipelines = Pipelines(workers, tmp_path)
    tasks = [task("one", usage_line(60)), task("two", usage_line(60))]
    async with workers.worker():
        over = await workers.ended(await pipelines.submit(*tasks, budget={"tokens": 100}, max_attempts=4))
        assert error_code(over) == (Status.FAILED, OVER)
        assert (over.attempts, over.usage) == (1, {"tokens": 120})
        filled = await workers.ended(await pipelines.submit(*tasks))
        assert filled.status is Status.SUCCEEDED
        cached = await workers.ended(await pipelines.submit(*tasks, budget={"tokens": 1}))
        assert (cached.status, cached.usage) == (Status.SUCCEEDED, {})


async def test_usage_counts_though_the_log_is_full(workers: InProcessWorkers) -> None:
    """Proves H5, E4."""
    workers.set(log_max_bytes=1000)
    script = f"""
    seq 1000; i=0
    while [ $i -lt 100 ]; do i=$((i + 1)); {usage_line(1)}; echo '{{"event":"page","n":1}}'; done
    """
    job = await workers.sh(script, budget={"tokens": 99})
    async with workers.worker():
        ended = await workers.ended(job)
    assert (ended.usage, error_code(ended)) == ({"tokens": 100}, (Status.FAILED, OVER))
    assert len(await workers.events(job, "usage")) < 100  # Counted, not kept: the history stays within its cap.


async def test_usage_counts_though_the_events_beside_it_cannot_be_kept(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves H5."""
    monkeypatch.setattr("holdfast.store.events.MAX_APPEND", 2000)

    @workers.functions.add
    async def spend(ctx: Context) -> None:
        ctx.event("large", text="x" * 4000)
        ctx.usage(tokens=120)

    job = await workers.submit("spend", budget={"tokens": 100})
    async with workers.worker():
        ended = await workers.ended(job)
    assert (ended.usage, error_code(ended)) == ({"tokens": 120}, (Status.FAILED, OVER))
    assert [event.data for event in await workers.events(job, "usage")] == [{"tokens": 120}]


async def test_usage_of_a_function_that_outlasts_the_drain_grace_counts(workers: InProcessWorkers) -> None:
    """Proves H5."""
    workers.set(drain_grace=0.1)
    said = asyncio.Event()

    @workers.functions.add
    async def spend(ctx: Context) -> None:
        await ctx.cancel.requested_async()
        ctx.usage(tokens=120)
        said.set()
        await asyncio.sleep(3600)  # Reason: the job does not end by itself.

    job = await workers.submit("spend", budget={"tokens": 100}, max_attempts=4)
    started = asyncio.Event()
    async with workers.worker(at=lambda step, lease: started.set() if step == "claimed" else None):
        await started.wait()
    assert said.is_set()
    ended = await workers.get(job)
    assert (ended.usage, error_code(ended)) == ({"tokens": 120}, (Status.FAILED, OVER))


async def test_exit_that_an_adopter_collects_is_held_to_the_budget(processes: WorkerProcesses) -> None:
    """Proves H5."""
    gate = str(processes.folder / "spend.gate")
    script = f'echo up >"$MARKER"; while [ ! -e {gate} ]; do sleep 0.05; done; {usage_line(120)}; echo out >>"$MARKER"'
    job = await processes.sh(script, env={"MARKER": processes.marker("spend")}, budget={"tokens": 100}, max_attempts=4)
    first = processes.start({"default": 4})
    await processes.wait_for_marker("spend")
    first.kill()
    await first.dead()
    processes.open_gate("spend")
    await processes.wait_for_marker("spend", lines=2)
    processes.start({"default": 4})
    ended = await processes.ended(job)
    assert error_code(ended) == (Status.FAILED, OVER)
    assert (ended.attempts, ended.usage) == (1, {"tokens": 120})
