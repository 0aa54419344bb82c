"""Accept a job and claim it in one transaction: for a server that runs jobs in the request, without a queue.

Either the job exists and has an owner, or it does not exist: a crash leaves no job in a queue that no worker serves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import Conflict, Invalid, NeedFailed, QueuePaused, ReplayedJobDeleted
from holdfast.model import FUNCTION_DOMAIN, Lease
from holdfast.store.database import Database, Tx
from holdfast.store.jobs import Jobs
from holdfast.submission import QUEUE, Accepted, Submission, build_batch


class DirectJobs:
    def __init__(self, database: Database, jobs: Jobs) -> None:
        self._database = database
        self._jobs = jobs

    async def accept(
        self,
        worker: str,
        job: Submission | Mapping[str, Any],
        *,
        domain: str,
        ttl: float,
        tenant: str = "default",
        key: str | None = None,
        sent: Sequence[Any] | None = None,
    ) -> tuple[Accepted, Lease | None]:
        """Accept a job that can start at once, and claim it; return no lease for a job that exists already."""
        batch = build_batch([job], tenant, key, sent, self._jobs.defaults)

        async def change(tx: Tx) -> tuple[Accepted, Lease | None]:
            (accepted,) = batch.answer(await tx.submit(batch))
            if accepted.reused:
                return accepted, None
            leases = await tx.values("claim_one", Lease, **_claiming_one(accepted.id, worker, domain, ttl))
            if not leases:
                (row,) = await tx.rows("get_job", id=accepted.id, tenant=tenant)
                if row["lane"] is not None:
                    raise Invalid("lane", "of its function needs the queue, which is off here (HOLDFAST_QUEUE_ENABLED)")
                raise QueuePaused(f"queue {batch.jobs[0].queue or QUEUE} is paused")
            return accepted, leases[0]

        try:
            accepted, lease = await self._database.transact(change)
        except (ReplayedJobDeleted, NeedFailed, QueuePaused):
            raise
        except Conflict:
            await self._jobs.refuse_taken_ids(batch)
            raise
        self._jobs.after_moves.claimed(int(lease is not None))
        return accepted, lease

    async def claim(self, worker: str, job_id: str, *, domain: str, ttl: float) -> Lease | None:
        """Claim one claimable job: a retry that is due."""
        leases = await self._database.values("claim_one", Lease, **_claiming_one(job_id, worker, domain, ttl))
        self._jobs.after_moves.claimed(len(leases))
        return leases[0] if leases else None


def _claiming_one(job_id: str, worker: str, domain: str, ttl: float) -> dict[str, object]:
    """Return the parameters of the statement `claim_one`."""
    return {"id": job_id, "worker": worker, "domain": domain, "ttl": ttl, "function": FUNCTION_DOMAIN}
