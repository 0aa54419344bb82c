"""Stop requests on jobs: cancel, interrupt, escalation, and the recorded steps."""

import pytest

from holdfast.model import Cause, Error, Outcome, Status, StopKind, StopPhase
from tests.support.job_states import PROCESS, in_status
from tests.support.store_harness import TTL, StoreHarness


async def test_job_cancelled_before_its_start_is_readable_everywhere(harness: StoreHarness) -> None:
    """Proves J3, J5."""
    job = await harness.submit(lane="L")
    await harness.advance(5)
    answer = await harness.store.jobs.cancel(job.id, by="ada", reason="wrong file")
    assert answer.outcome == "ended"
    record = await harness.get(job)
    assert (record.status, record.started_at, record.finished_at) == (Status.CANCELLED, None, harness.clock.now())
    assert record.error == Error(code="cancelled", message="cancelled before it started: wrong file")
    (listed,) = (await harness.store.jobs.list(status=[Status.CANCELLED])).items
    assert listed == record
    audit = [event.data for event in await harness.events(job) if event.type == "audit"]
    assert audit == [{"action": "cancel", "by": "ada", "reason": "wrong file"}]
    assert await harness.store.attempts.list(job.id) == []
    assert (await harness.store.lanes.get("L")).depth == 0


async def test_cancel_is_answered_by_the_state_of_the_job(harness: StoreHarness) -> None:
    """Proves C1."""
    running = await in_status(harness, Status.RUNNING)
    assert [(await harness.store.jobs.cancel(running.id)).outcome for _ in range(2)] == ["stopping", "stopping"]
    requests = [event for event in await harness.events(running) if event.type == "cancel"]
    assert [event.data for event in requests] == [{"cancel": "requested", "kind": "cancel"}]
    waiting = await harness.submit()
    assert [(await harness.store.jobs.cancel(waiting.id)).outcome for _ in range(2)] == ["ended", "already"]


async def test_later_stop_request_only_escalates(harness: StoreHarness) -> None:
    """Proves C1."""
    job = await in_status(harness, Status.RUNNING)

    async def kind() -> StopKind | None:
        request = (await harness.get(job)).stop_request
        return None if request is None else request.kind

    await harness.store.jobs.interrupt(job.id)
    assert await kind() is StopKind.INTERRUPT
    await harness.store.jobs.cancel(job.id)
    assert await kind() is StopKind.CANCEL
    await harness.store.jobs.interrupt(job.id)
    assert await kind() is StopKind.CANCEL
    await harness.store.jobs.delete(job.id, force=True)
    assert await kind() is StopKind.DELETE
    await harness.store.jobs.cancel(job.id)
    assert await kind() is StopKind.DELETE


@pytest.mark.parametrize("lane", [None, "L"])
@pytest.mark.parametrize(
    ("stop", "status", "code"),
    [("cancel", Status.CANCELLED, "cancelled"), ("interrupt", Status.PAUSED, "interrupted")],
)
async def test_stop_request_turns_a_requeue_into_the_stop(
    harness: StoreHarness, stop: str, status: Status, code: str, lane: str | None
) -> None:
    """Proves C1, C6."""
    job = await harness.submit(max_attempts=3, lane=lane)
    (lease,) = await harness.claim()
    await getattr(harness.store.jobs, stop)(job.id)
    assert await harness.finish(lease, Outcome.requeued(Cause.EXIT, delay=5)) is status
    record = await harness.get(job)
    assert (record.status, record.error and record.error.code) == (status, code)
    assert await harness.claim() == []


async def test_only_resume_clears_a_stop_request(harness: StoreHarness) -> None:
    """Proves C1, C8."""
    job = await harness.submit(**PROCESS, max_attempts=3)
    (lease,) = await harness.claim_process()
    await harness.store.jobs.interrupt(job.id)
    await harness.advance(TTL + 1)
    await harness.store.leases.reap()
    (lease,) = await harness.adopt()
    assert lease.adoption.stop_request is not None
    await harness.finish(lease, Outcome.requeued(Cause.LOST))
    assert await harness.status(job) is Status.PAUSED
    resumed = await harness.store.jobs.resume(job.id)
    assert resumed.stop_request is None
    (lease,) = await harness.claim_process()
    assert lease.adoption.stop_request is None
    assert await harness.store.leases.stop_requests("w1") == {}


async def test_interrupt_pauses_a_running_job_and_cancels_a_waiting_one(harness: StoreHarness) -> None:
    """Proves C6."""
    running = await in_status(harness, Status.RUNNING)
    assert (await harness.store.jobs.interrupt(running.id)).outcome == "stopping"
    waiting, held = await harness.submit(), await harness.submit(hold=True)
    for job in (waiting, held):
        assert (await harness.store.jobs.interrupt(job.id)).job.status is Status.CANCELLED
    paused = await in_status(harness, Status.PAUSED)
    assert (await harness.store.jobs.interrupt(paused.id)).outcome == "already"
    assert await harness.status(paused) is Status.PAUSED


async def test_stop_sequence_is_recorded_step_by_step(harness: StoreHarness) -> None:
    """Proves C1."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    assert not await harness.store.leases.advance_stop(lease, StopPhase.SIGNALLED)  # nobody asked
    await harness.store.jobs.cancel(job.id)
    for phase in (StopPhase.SIGNALLED, StopPhase.KILLED, StopPhase.DEAD):
        assert await harness.store.leases.advance_stop(lease, phase, grace=2)
    await harness.finish(
        lease, Outcome(status=Status.CANCELLED, cause=Cause.CANCELLED, error=Error(code="cancelled", message="by ada"))
    )
    steps = [event.data["cancel"] for event in await harness.events(job) if event.type == "cancel"]
    assert steps == ["requested", "signalled", "killed", "dead"]
