"""Registered workers, the attempts they made, and the leaders of duties."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import Conflict, NotFound
from holdfast.model import FUNCTION_DOMAIN, Attempt, WorkerRecord
from holdfast.store.audit import By, name_of, record
from holdfast.store.database import Database, Tx, json_text
from holdfast.store.orphans import Orphans
from holdfast.store.rows import known_id, to_attempt, to_json, to_worker
from holdfast.store.transitions import clean, event

BATCH = 100


class LostHost(msgspec.Struct, frozen=True, kw_only=True):
    """The result of reporting a host as gone: its workers are deleted, and these jobs are settled as lost."""

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
        """Register a worker and what it can run; repeat it after a change. Heartbeats keep the row fresh.

        `away` names what the worker cannot run now because its engine is unreachable, and why.
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
        """Register the defaults of functions for every submit: (name, revision, defaults).

        A lower revision overwrites nothing. Of equal revisions, the last call wins.
        """
        rows = [
            {"function": name, "revision": revision, "defaults": json_text(dict(defaults))}
            for name, revision, defaults in functions
        ]
        if rows:
            await self._database.rows("register_functions", rows=rows)

    async def report(self, worker: str, figures: Mapping[str, Any], *, first: bool = True) -> bool:
        """Store a worker's counters; return False if the row with its last report is gone."""
        return bool(await self._database.rows("report_figures", worker=worker, figures=dict(figures), first=first))

    async def totals(self) -> Mapping[str, Any]:
        """Return the summed counters of all workers that are gone, in the form of one worker's report."""
        figures: dict[str, Any] = {"finishes": {}}
        for row in await self._database.read("totals"):
            if row["status"]:
                figures["finishes"][row["status"]] = row["count"]
            else:
                figures[row["counter"]] = row["count"]
        return figures

    async def add_totals(self, figures: Mapping[str, Any]) -> None:
        """Add the counters of a process that has no row, such as a server that exits."""
        await self._database.rows("add_totals", figures=dict(figures))

    async def delete(self, worker: str) -> None:
        """Delete a worker's row; its counters stay in the totals."""
        await self._database.rows("delete_worker", worker=worker)

    async def drain(self, worker: str, *, by: By = None) -> None:
        """Ask a worker to claim nothing more and hand over; it learns of it with its next heartbeat."""

        async def change(tx: Tx) -> None:
            if not await tx.rows("drain_worker", worker=worker):
                raise NotFound("worker", worker)
            await record(tx, by, "worker.drain", worker, after={"workers": [worker]})

        await self._database.transact(change)

    async def drain_host(self, host: str, *, by: By = None) -> Sequence[str]:
        """Ask every worker of a host to drain; return the workers."""

        async def change(tx: Tx) -> Sequence[str]:
            rows = await tx.rows("drain_host", host=host)
            if not rows:
                raise NotFound("worker of host", host)
            workers = sorted(row["worker"] for row in rows)
            await record(tx, by, "worker.drain", host, after={"workers": workers})
            return workers

        return await self._database.transact(change)

    async def lost(self, host: str, *, by: By = None) -> LostHost:
        """Settle all attempts of a host, or of one domain, as lost: a person says that nothing runs there any more.

        The leases of its dead workers are cleared; orphans and jobs that are paused as lost in its domains are settled
        by their `on_lost`. A domain that a live worker of another host reaches is left to that worker, and functions to
        the duties. Repeat the call after a crash: it continues, because the workers are deleted last.
        """
        workers = await self._database.read("workers_of_host", host=host)
        for row in workers:
            if row["live"]:
                raise Conflict(
                    f"{host} is not gone: its worker {row['worker']} is alive; stop it, or wait until its row expires"
                )
        domains = {host}.union(*(to_json(row["domains"], []) for row in workers if row["host"] == host))
        domains.discard(FUNCTION_DOMAIN)
        if not workers and not await self._orphans.open_in([host] if domains else [], limit=1):
            raise NotFound("host or domain", host)
        dead = [row["worker"] for row in workers]
        # Recorded first, since many transactions follow: after a crash among them no change is unrecorded.
        await record(self._database, by, "worker.lost", host, after={"workers": dead})
        for worker in dead:
            await self._orphans.clear(worker)
        jobs = [job_id async for job_id in self._lose_all(domains, host, name_of(by))]
        await self._database.rows("delete_dead_workers", workers=dead)
        return LostHost(workers=tuple(dead), jobs=tuple(jobs))

    async def _lose_all(self, domains: set[str], host: str, by: str | None) -> AsyncIterator[str]:
        """Settle page by page, without attempts that a live worker reaches by now."""
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

    async def prune(self, age: float, limit: int = BATCH) -> int:
        """Delete workers that died at least `age` seconds ago, own no job and have no orphan in their domains."""
        rows = await self._database.rows("prune_workers", age=age, function=FUNCTION_DOMAIN, limit=limit)
        return len(rows)

    async def list(self, *, tenant: str | None = None) -> Sequence[WorkerRecord]:
        """Return all workers; with a tenant, only that tenant's jobs are named."""
        return [to_worker(row) for row in await self._database.read("list_workers", tenant=tenant)]

    async def lead(self, duty: str, leader: str, *, ttl: float) -> int | None:
        """Become or stay the leader of a duty; return the term, or None. Saves work: every duty is safe with two."""
        rows = await self._database.rows("lead", duty=duty, leader=leader, ttl=ttl)
        return rows[0]["term"] if rows else None

    async def resign(self, duty: str, leader: str) -> None:
        await self._database.rows("resign", duty=duty, leader=leader)


class Attempts:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self, job_id: str, *, tenant: str = "default") -> Sequence[Attempt]:
        """Return every attempt of a job, the open one last."""
        job_id = known_id(job_id)
        if not await self._database.read("find_job", id=job_id, tenant=tenant):
            raise NotFound("job", job_id)
        return [to_attempt(row) for row in await self._database.read("list_attempts", id=job_id)]

    async def current(self, attempts: Sequence[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        """Return which of these (job, attempt) pairs are open: running, orphaned, or paused with an unknown end."""
        rows = [{"id": job_id, "attempt": attempt} for job_id, attempt in attempts]
        found = await self._database.read("current_attempts", rows=rows)
        return frozenset((row["id"], row["attempt"]) for row in found)

    async def tokens(self, ids: Sequence[str]) -> frozenset[tuple[str, int, int]]:
        """Return every recorded (job, attempt, token) of these jobs: files of these attempts belong to their jobs."""
        rows = await self._database.read("attempt_tokens", ids=list(ids))
        return frozenset((row["id"], row["attempt"], row["token"]) for row in rows)

    async def in_domains(self, prefix: str, ids: Sequence[str]) -> frozenset[str]:
        """Return which of these jobs had an attempt in a domain that begins with `prefix`, such as `docker:`."""
        rows = await self._database.read("jobs_of_domains", ids=list(ids), prefix=prefix)
        return frozenset(row["id"] for row in rows)
