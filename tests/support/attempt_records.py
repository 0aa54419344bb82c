"""What the tests read of a job's attempts."""

from collections.abc import Sequence

from holdfast.model import Attempt, Cause, Job
from tests.support.in_process_workers import InProcessWorkers


async def attempts_of(workers: InProcessWorkers, job: Job) -> Sequence[Attempt]:
    return await workers.store.attempts.list(job.id)


def assert_only_waited(attempts: Sequence[Attempt]) -> None:
    """Nothing ran in these attempts, for lack of space."""
    for attempt in attempts:
        assert attempt.error is not None
        assert (attempt.cause, attempt.error.code, attempt.started_at) == (Cause.DRAINED, "disk_full", None)
