"""Workers that said they live, the attempts they made, and who leads a duty."""

from collections.abc import Mapping, Sequence

from holdfast.errors import Conflict, NotFound
from holdfast.model import Attempt, Worker
from holdfast.store.database import Database
from holdfast.store.rows import known_id, to_attempt, to_worker


class Workers:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def register(
        self,
        worker: str,
        *,
        host: str,
        pid: int,
        queues: Mapping[str, int],
        capabilities: Sequence[str],
        domains: Sequence[str],
        ttl: float,
    ) -> None:
        """Say who this worker is and what it can run; again to say that it changed. Heartbeats keep the row fresh."""
        rows = await self._database.rows(
            "register_worker",
            worker=worker,
            host=host,
            pid=pid,
            queues=dict(queues),
            capabilities=list(capabilities),
            domains=list(domains),
            ttl=ttl,
        )
        if not rows:
            raise Conflict(f"worker id {worker} belongs to another process; ids are never reused")

    async def forget(self, worker: str) -> None:
        await self._database.rows("forget_worker", worker=worker)

    async def drain(self, worker: str) -> None:
        """Ask a worker to take nothing new and hand over; its next heartbeat hears it."""
        if not await self._database.rows("drain_worker", worker=worker):
            raise NotFound("worker", worker)

    async def drain_host(self, host: str) -> Sequence[str]:
        """Ask every worker of a host to drain; return who was asked."""
        rows = await self._database.rows("drain_host", host=host)
        if not rows:
            raise NotFound("worker of host", host)
        return sorted(row["worker"] for row in rows)

    async def list(self) -> Sequence[Worker]:
        return [to_worker(row) for row in await self._database.read("list_workers")]

    async def lead(self, duty: str, leader: str, *, ttl: float) -> int | None:
        """Become or stay the leader of a duty: the term if so, else None. Saves work; every duty is safe with two."""
        rows = await self._database.rows("lead", duty=duty, leader=leader, ttl=ttl)
        return rows[0]["term"] if rows else None

    async def resign(self, duty: str, leader: str) -> None:
        await self._database.rows("resign", duty=duty, leader=leader)


class Attempts:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self, job_id: str, *, tenant: str = "default") -> Sequence[Attempt]:
        """Every attempt of a job, the open one last."""
        job_id = known_id(job_id)
        if not await self._database.read("find_job", id=job_id, tenant=tenant):
            raise NotFound("job", job_id)
        return [to_attempt(row) for row in await self._database.read("list_attempts", id=job_id)]

    async def current(self, attempts: Sequence[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        """Which of these (job, attempt) are open still: running, orphaned, or paused with their end unknown."""
        rows = [{"id": job_id, "attempt": attempt} for job_id, attempt in attempts]
        found = await self._database.read("current_attempts", rows=rows)
        return frozenset((row["id"], row["attempt"]) for row in found)
