"""Attempts: which count, when the next one runs, and how a lost one ends."""

import pytest

from holdfast.model import Cause, Error, Outcome, Phase, Status
from holdfast.timing import backoff
from tests.support.job_states import PROCESS, orphan
from tests.support.store_harness import StoreHarness


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.requeued(Cause.LOST, delay=5, error=Error(code="lost", message="gone")), Status.QUEUED),
        (Outcome.failed("lost", "gone", cause=Cause.LOST), Status.FAILED),
        (
            Outcome(status=Status.PAUSED, cause=Cause.LOST, error=Error(code="lost", message="gone")),
            Status.PAUSED,
        ),
    ],
)
async def test_a_loss_ends_as_its_policy_says(harness: StoreHarness, outcome: Outcome, status: Status) -> None:
    """Proves L11, L13."""
    dead = await orphan(harness, max_attempts=2)
    (lease,) = await harness.adopt()
    assert await harness.finish(lease, outcome) is status
    job = await harness.get(dead)
    assert job.attempts == 1
    assert job.error == Error(code="lost", message="gone")
    (attempt,) = await harness.store.attempts.list(dead.id)
    assert attempt.cause is Cause.LOST
    if status is Status.QUEUED:
        await harness.advance(6)
        await harness.store.gates.promote()
        (again,) = await harness.claim_process()
        assert (again.attempt, again.spent, again.attempts_left) == (2, 1, 0)


async def test_policy_reaches_the_worker(harness: StoreHarness) -> None:
    """Proves L11."""
    retry = {"base": 1, "cap": 8, "on": ["failed", "timed_out"]}
    await harness.submit(on_lost="pause", retry=retry, timeout=9, stop_grace=0)
    (lease,) = await harness.claim()
    policy = lease.policy
    assert (policy.on_lost, policy.timeout, policy.stop_grace, policy.idle_timeout) == ("pause", 9, 0, None)
    assert (policy.retry.base, policy.retry.cap, policy.retry.on) == (1, 8, ("failed", "timed_out"))
    assert (await harness.get(lease)).policy == policy


def test_backoff_doubles_up_to_its_cap() -> None:
    """Proves L12."""
    assert [backoff(n, base=5, cap=300) for n in range(1, 9)] == [5, 10, 20, 40, 80, 160, 300, 300]
    assert backoff(10_000, base=5, cap=300) == 300


async def test_retry_waits_its_backoff(harness: StoreHarness) -> None:
    """Proves L12."""
    await harness.submit(max_attempts=5)
    for n in (1, 2, 3):
        (lease,) = await harness.claim()
        delay = backoff(n, base=5, cap=300)
        await harness.finish(lease, Outcome.requeued(Cause.EXIT, delay=delay))
        assert await harness.store.next_due() == delay
        await harness.advance(delay - 1)
        assert await harness.store.gates.promote() == 0
        await harness.advance(1)
        assert await harness.store.gates.promote() == 1


async def test_attempts_count_what_started_and_was_not_drained(harness: StoreHarness) -> None:
    """Proves L13."""
    job = await harness.submit(**PROCESS)
    (lease,) = await harness.claim_process()
    assert (lease.adoption.phase, (await harness.get(job)).attempts) == (Phase.CLAIMED, 0)
    # Drained before the start: not counted, its ordinal not reused.
    await harness.finish(lease, Outcome.requeued(Cause.DRAINED))
    assert (await harness.get(job)).attempts == 0
    (lease,) = await harness.claim_process()
    assert (lease.attempt, lease.spent) == (2, 0)
    assert await harness.store.leases.start([lease]) == {job.id}
    assert (await harness.get(job)).attempts == 1
    # A start that fails counts.
    await harness.finish(lease, Outcome.requeued(Cause.START_FAILED))
    assert (await harness.get(job)).attempts == 1
    attempts = await harness.store.attempts.list(job.id)
    assert [(a.attempt, a.cause) for a in attempts] == [(1, "drained"), (2, "start_failed")]


async def test_drained_function_is_not_counted(harness: StoreHarness) -> None:
    """Proves L13."""
    job = await harness.submit()
    (lease,) = await harness.claim()
    assert (await harness.get(job)).attempts == 1
    await harness.finish(lease, Outcome.requeued(Cause.DRAINED))
    assert (await harness.get(job)).attempts == 0
    (lease,) = await harness.claim()
    assert (lease.attempt, lease.spent) == (2, 0)
