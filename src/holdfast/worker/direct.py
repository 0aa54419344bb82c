"""Jobs that run in the request that submits them: a worker that does not claim, and a cap instead of a queue.

A job is accepted and claimed in one transaction, or refused immediately. From then on it is a job like any other: the
same executor, leases, events and finish. Orphans of a crashed server are adopted by the worker and count against the
cap until they end.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from holdfast.config import Settings
from holdfast.errors import AtCapacity, Conflict, DiskFull, NotFound
from holdfast.model import Gate, Job, Lease, Status
from holdfast.runner_specs import capability_of
from holdfast.store import Store
from holdfast.submission import Accepted, check, fingerprint, parse
from holdfast.timing import jitter
from holdfast.worker.batch_writer import with_retries
from holdfast.worker.worker import Worker


class DirectRun:
    """A job that this server runs, or found running, and whose end a caller can wait for."""

    def __init__(self, job_id: str, tenant: str, *, reused: bool) -> None:
        self.job_id = job_id
        self.tenant = tenant
        self.reused = reused
        self.over = asyncio.Event()

    def joined(self) -> "DirectRun":
        """Return the same job for another caller, as reused."""
        run = DirectRun(self.job_id, self.tenant, reused=True)
        run.over = self.over
        return run


class DirectExecutor:
    """Runs at most `max_concurrency` jobs at once, retries included."""

    def __init__(self, worker: Worker, store: Store, settings: Settings) -> None:
        self._worker = worker
        self._store = store
        self._settings = settings
        self.on_disconnect = settings.on_disconnect
        self._admitted = 0
        self._keys: dict[tuple[str, str, str], DirectRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def leave(self) -> None:
        """Drain: accept nothing new, and hand over."""
        self._worker.drain()

    async def submit(self, job: Mapping[str, Any], *, tenant: str, key: str | None, sent: Sequence[Any]) -> DirectRun:
        """Accept and start a job, or raise AtCapacity. A repeated call whose job runs here joins that job."""
        again = None if key is None else (tenant, key, fingerprint(sent))
        if again is not None and again in self._keys:
            return self._keys[again].joined()
        self._refuse_if_full()
        domain = self._domain(check(parse(job), tenant).capability)
        self._admitted += 1
        released: asyncio.Event | None = None
        try:
            accepted, released = await self._start(job, domain, tenant, key, sent)
        finally:
            if released is None:  # Refused, or the job existed already.
                self._admitted -= 1
        run = DirectRun(accepted.id, tenant, reused=accepted.reused)
        if again is not None:
            self._keys[again] = run
        # Reason for a bare task: it outlives the request. `_tasks` keeps a reference.
        task = asyncio.create_task(self._look_on(run) if released is None else self._carry(run, released))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._over(run, task, again))
        return run

    def _refuse_if_full(self) -> None:
        if self._worker.draining:
            raise AtCapacity("this server is shutting down; use another one, or retry in a moment")
        most = self._settings.max_concurrency
        if self._admitted + self._worker.adopted >= most:
            raise AtCapacity(f"this server runs its maximum of {most} jobs; retry when one has ended")

    def _domain(self, capability: str) -> str:
        domain = self._worker.capabilities.domain_of(capability)
        if domain is None and (why := self._worker.capabilities.short_of_room(capability)) is not None:
            raise DiskFull(why)
        if domain is None:
            raise Conflict(f"this server has no queue and cannot run {capability} itself")
        return domain

    async def _start(
        self, job: Mapping[str, Any], domain: str, tenant: str, key: str | None, sent: Sequence[Any]
    ) -> tuple[Accepted, asyncio.Event | None]:
        accepted: list[Accepted] = []

        async def claim() -> Lease | None:
            ttl = self._settings.lease_ttl
            found, lease = await self._store.direct_jobs.accept(
                self._worker.id, job, domain=domain, ttl=ttl, tenant=tenant, key=key, sent=sent
            )
            accepted.append(found)
            return lease

        released = await self._take(claim)
        return accepted[0], released

    async def _take(self, claim: Callable[[], Awaitable[Lease | None]]) -> asyncio.Event | None:
        """Run a claimed job. Return an event that is set when its lease is released, or None if nothing was claimed."""

        async def leases() -> Sequence[Lease]:
            lease = await claim()
            return () if lease is None else (lease,)

        for held in await self._worker.take(leases):
            released = asyncio.Event()
            held.on_release = released.set
            return released
        return None

    def _over(self, run: DirectRun, task: "asyncio.Task[None]", key: tuple[str, str, str] | None) -> None:
        run.over.set()
        self._tasks.discard(task)
        if key is not None:
            self._keys.pop(key, None)

    async def _carry(self, run: DirectRun, released: asyncio.Event | None) -> None:
        """Run a job to its end, including its retries."""
        try:
            while released is not None:
                await released.wait()
                released = await self._retry(run)
        finally:
            self._admitted -= 1

    async def _look_on(self, run: DirectRun) -> None:
        """Wait for the end of a job that another server or worker runs."""
        while not self._worker.draining:
            job = await self._job(run)
            if job is None or job.status is not Status.RUNNING:
                return
            await asyncio.sleep(jitter(self._settings.poll_interval / 4))

    async def _retry(self, run: DirectRun) -> asyncio.Event | None:
        """Wait for the backoff, then claim the next attempt. Return None if the job has ended or is not ours."""
        while not self._worker.draining:
            job = await self._job(run)
            if job is None or job.status is not Status.QUEUED:
                return None
            if job.gate is Gate.OPEN and (released := await self._again(job)) is not None:
                return released
            await asyncio.sleep(jitter(self._settings.poll_interval))
        return None

    async def _again(self, job: Job) -> asyncio.Event | None:
        domain = self._worker.capabilities.domain_of(capability_of(job.runner, job.spec))
        if domain is None:
            return None
        ttl = self._settings.lease_ttl
        claim = self._store.direct_jobs.claim
        return await self._take(
            lambda: with_retries(lambda: claim(self._worker.id, job.id, domain=domain, ttl=ttl), "claiming a retry")
        )

    async def _job(self, run: DirectRun) -> Job | None:
        try:
            return await with_retries(lambda: self._store.jobs.get(run.job_id, tenant=run.tenant), "reading a job")
        except NotFound:
            return None
