"""Workers that said they live, the attempts they made, and who leads a duty."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import Conflict, NotFound
from holdfast.model import FUNCTION_DOMAIN, Attempt, Worker
from holdfast.store.database import Database, json_text
from holdfast.store.moves import clean, event
from holdfast.store.orphans import Orphans
from holdfast.store.rows import known_id, to_attempt, to_json, to_worker

BATCH = 100


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a host that was reported gone: its workers are forgotten, these jobs are settled as lost."""

    workers: tuple[str, ...]
    jobs: tuple[str, ...]


class Workers:
    def __init__(self, database: Database, orphans: Orphans) -> None:
        self._database = database
        self._orphans = orphans

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
        away: Mapping[str, str] | None = None,
    ) -> None:
        """Say who this worker is and what it can run; again to say that it changed. Heartbeats keep the row fresh.

        `away` says what it could run but for an engine that is away, and why.
        """
        rows = await self._database.rows(
            "register_worker",
            worker=worker,
            host=host,
            pid=pid,
            queues=dict(queues),
            capabilities=list(capabilities),
            domains=list(domains),
            away={capability: clean(why) for capability, why in (away or {}).items()},
            ttl=ttl,
        )
        if not rows:
            raise Conflict(f"worker id {worker} belongs to another process; ids are never reused")

    async def register_functions(self, functions: Sequence[tuple[str, int, Mapping[str, Any]]]) -> None:
        """Make the defaults of functions hold for every submit: (name, revision, defaults).

        A lower revision overwrites nothing. Of the same revision, the last call wins.
        """
        rows = [
            {"function": name, "revision": revision, "defaults": json_text(dict(defaults))}
            for name, revision, defaults in functions
        ]
        if rows:
            await self._database.rows("register_functions", rows=rows)

    async def report(self, worker: str, figures: Mapping[str, Any], *, first: bool = True) -> bool:
        """Leave what a worker has counted for others; False if the row that had its last report is gone."""
        return bool(await self._database.rows("report_figures", worker=worker, figures=dict(figures), first=first))

    async def totals(self) -> Mapping[str, Any]:
        """What all workers that are gone have counted, as one worker reports it."""
        figures: dict[str, Any] = {"finishes": {}}
        for row in await self._database.read("totals"):
            if row["status"]:
                figures["finishes"][row["status"]] = row["count"]
            else:
                figures[row["counter"]] = row["count"]
        return figures

    async def add_totals(self, figures: Mapping[str, Any]) -> None:
        """Keep what a process has counted that has no row, such as a server that leaves."""
        await self._database.rows("add_totals", figures=dict(figures))

    async def forget(self, worker: str) -> None:
        """Remove a worker's row; what it reported stays in the totals."""
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

    async def lost(self, host: str, *, by: str | None = None) -> Lost:
        """Take somebody's word that a host, or one domain, is gone: what ran there has stopped, and ends as lost.

        The leases of its dead workers are cleared; orphans and jobs that are paused as lost in its domains are settled
        by their `on_lost`. A domain that a live worker of another host reaches is left to that one, and functions to
        the duties. Called again after a crash in the middle, it goes on: the workers are forgotten last.
        """
        workers = await self._database.read("workers_of", host=host)
        for row in workers:
            if row["live"]:
                raise Conflict(
                    f"{host} is not gone: its worker {row['worker']} lives; stop it, or wait until its row has expired"
                )
        domains = {host}.union(*(to_json(row["domains"], []) for row in workers if row["host"] == host))
        domains.discard(FUNCTION_DOMAIN)
        if not workers and not await self._orphans.open_in([host] if domains else [], limit=1):
            raise NotFound("host or domain", host)
        dead = [row["worker"] for row in workers]
        for worker in dead:
            await self._orphans.clear(worker)
        jobs = [job_id async for job_id in self._lose_all(domains, host, by)]
        await self._database.rows("forget_dead", workers=dead)
        return Lost(workers=tuple(dead), jobs=tuple(jobs))

    async def _lose_all(self, domains: set[str], host: str, by: str | None) -> AsyncIterator[str]:
        """Settle page by page, leaving out what a live worker reaches by now."""
        message = f"the attempt was lost with {host}, which was reported gone"
        events = [event("audit", action="lost", host=host, by=by and clean(by))]
        after: str | None = None
        while True:
            reached = {row["domain"] for row in await self._database.read("live_domains")}
            page = await self._orphans.open_in(sorted(domains - reached), after=after, limit=BATCH)
            for orphan in page:
                if await self._orphans.lose(orphan, message=message, events=events) is not None:
                    yield orphan.id
            if len(page) < BATCH:
                return
            after = page[-1].id

    async def forget_long_dead(self, age: float, limit: int = BATCH) -> int:
        """Forget workers that died so many seconds ago and have left nothing that somebody may want to reach."""
        rows = await self._database.rows("forget_long_dead", age=age, function=FUNCTION_DOMAIN, limit=limit)
        return len(rows)

    async def list(self, *, tenant: str | None = None) -> Sequence[Worker]:
        """All workers; with a tenant, only its own jobs are named."""
        return [to_worker(row) for row in await self._database.read("list_workers", tenant=tenant)]

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

    async def standing(self, ids: Sequence[str]) -> frozenset[tuple[str, int, int]]:
        """Every (job, attempt, token) of these jobs that is in the record: what it left belongs to it."""
        rows = await self._database.read("standing_attempts", ids=list(ids))
        return frozenset((row["id"], row["attempt"], row["token"]) for row in rows)

    async def in_domains(self, prefix: str, ids: Sequence[str]) -> frozenset[str]:
        """Which of these jobs had an attempt in a domain that begins with some text, such as `docker:`."""
        rows = await self._database.read("jobs_of_domains", ids=list(ids), prefix=prefix)
        return frozenset(row["id"] for row in rows)
