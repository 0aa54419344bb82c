"""Jobs in a certain state, brought there by the operations that callers and workers use."""

from typing import Any

from holdfast.model import Error, Job, Lease, Outcome, Status
from tests.support.store_harness import TTL, StoreHarness

PROCESS = {"runner": "process", "spec": {"command": ["true"]}}


async def orphan(harness: StoreHarness, **fields: object) -> Lease:
    """A process job whose worker died after the start."""
    await harness.submit(**{**PROCESS, **fields})
    (lease,) = await harness.claim_process()
    await harness.store.leases.start([lease])
    await harness.advance(TTL + 1)
    assert len(await harness.store.leases.reap()) == 1
    return lease


async def in_status(harness: StoreHarness, status: Status, **fields: Any) -> Job:
    """A job that went to a status on an ordinary way."""
    if status is Status.PENDING:
        return await harness.submit(hold=True, **fields)
    job = await harness.submit(**fields)
    if status is Status.CANCELLED:
        await harness.store.jobs.cancel(job.id)
    elif status is not Status.QUEUED:
        (lease,) = await harness.claim()
        if status is not Status.RUNNING:
            error = None if status is Status.SUCCEEDED else Error(code="exit_nonzero", message="boom")
            await harness.finish(lease, Outcome(status=status, error=error))
    assert await harness.status(job) is status
    return await harness.get(job)
