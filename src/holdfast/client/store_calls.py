"""What can be done with a job, on the database. The counterpart over HTTP is `HttpClient`."""

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from holdfast.client.head_watch import HeadWatch
from holdfast.errors import NotFound
from holdfast.model import Attempt, Event, Job, Json, Status, TaskRecord
from holdfast.response_types import Explanation
from holdfast.runner.artifacts import Artifact, ArtifactStore
from holdfast.store import Store
from holdfast.store.events import EventPage


class StoreCalls:
    """The calls of a job handle, for one tenant of a store. `artifacts_of` opens the artifact store."""

    def __init__(self, store: Store, tenant: str, artifact_store: Callable[[], Awaitable[ArtifactStore]]) -> None:
        self._store = store
        self._tenant = tenant
        self._artifact_store = artifact_store
        self._heads = HeadWatch(store)

    async def close(self) -> None:
        await self._heads.close()

    async def get(self, job_id: str, *, reconnect: bool = False) -> Job:
        """Return the job as it is now. With `reconnect`, wait for an unreachable database, as `wait` does."""
        if reconnect:
            return await self._heads.retried(lambda: self._store.jobs.get(job_id, tenant=self._tenant))
        return await self._store.jobs.get(job_id, tenant=self._tenant)

    async def jobs(
        self,
        *,
        status: Sequence[str] = (),
        kind: str | None = None,
        queue: str | None = None,
        lane: str | None = None,
        labels: Mapping[str, str] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> tuple[Sequence[Job], str | None]:
        """Return one page of jobs, newest first, and the cursor of the next."""
        page = await self._store.jobs.list(
            tenant=self._tenant,
            status=[Status(one) for one in status],
            kind=kind,
            queue=queue,
            lane=lane,
            labels=labels,
            since=since,
            until=until,
            limit=limit,
            cursor=cursor,
        )
        return page.items, page.next_cursor

    async def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        """Wait until a job has ended or needs a person; wait out an unreachable database, as `follow` does."""
        async with asyncio.timeout(timeout):
            while True:
                job = await self.get(job_id, reconnect=True)
                if _settled(job.status):
                    return job
                head = await self._heads.after(job.id, self._tenant, job.last_seq)
                while not _settled(head.status):
                    head = await self._heads.after(job.id, self._tenant, head.seq)

    async def follow(self, job_id: str, *, after: int = 0) -> AsyncGenerator[Event]:
        """Yield every event after `after` as it arrives, to the end of the job; wait out an unreachable database."""
        job = await self.get(job_id, reconnect=True)
        seq, ended = job.last_seq, job.status.terminal
        while True:
            while after < seq:
                page = await self._heads.retried(partial(self._page, job.id, after))
                for event in page.items:
                    after = event.seq
                    yield event
            if ended:
                return
            head = await self._heads.after(job.id, self._tenant, after)
            seq, ended = head.seq, head.status.terminal

    async def _page(self, job_id: str, after: int) -> EventPage:
        return await self._store.events.page(job_id, tenant=self._tenant, after=after)

    async def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> tuple[Sequence[Event], int | None]:
        page = await self._store.events.page(job_id, tenant=self._tenant, after=after, limit=limit)
        return page.items, page.next_after

    async def attempts(self, job_id: str) -> Sequence[Attempt]:
        return await self._store.attempts.list(job_id, tenant=self._tenant)

    async def tasks(self, job_id: str) -> Sequence[TaskRecord]:
        return await self._store.tasks.list(job_id, tenant=self._tenant)

    async def explain(self, job_id: str) -> Explanation:
        return await self._store.explain.job(job_id, tenant=self._tenant)

    async def cancel(self, job_id: str, *, reason: str | None = None) -> Job:
        return (await self._store.jobs.cancel(job_id, tenant=self._tenant, reason=reason)).job

    async def interrupt(self, job_id: str, *, reason: str | None = None) -> Job:
        return (await self._store.jobs.interrupt(job_id, tenant=self._tenant, reason=reason)).job

    async def resume(
        self,
        job_id: str,
        *,
        reason: str | None = None,
        budget: Mapping[str, float] | None = None,
        stopped: bool = False,
    ) -> Job:
        return await self._store.jobs.resume(job_id, tenant=self._tenant, reason=reason, budget=budget, stopped=stopped)

    async def resolve(self, job_id: str, result: Json = None, *, reason: str | None = None) -> Job:
        return await self._store.jobs.resolve(job_id, result, tenant=self._tenant, reason=reason)

    async def dismiss(self, job_id: str, *, reason: str | None = None) -> Job:
        return await self._store.jobs.dismiss(job_id, tenant=self._tenant, reason=reason)

    async def release(self, job_id: str) -> Job:
        return await self._store.jobs.release(job_id, tenant=self._tenant)

    async def delete(
        self, job_id: str, *, force: bool = False, dry_run: bool = False, reason: str | None = None
    ) -> str:
        done = await self._store.jobs.delete(job_id, tenant=self._tenant, force=force, dry_run=dry_run, reason=reason)
        return done.outcome

    # Files

    async def artifacts(self, job_id: str) -> Sequence[Artifact]:
        last = await self._last_attempt(job_id)
        if last is None:
            return ()
        stored = await self._artifact_store()
        return await asyncio.to_thread(stored.list, job_id, last.attempt, last.token)

    async def download(self, job_id: str, path: str, target: Path) -> None:
        last = await self._last_attempt(job_id)
        if last is None:
            raise NotFound("artifact", path)
        stored = await self._artifact_store()
        await asyncio.to_thread(_save, stored, (job_id, last.attempt, last.token, path), target)

    async def _last_attempt(self, job_id: str) -> Attempt | None:
        attempts = await self.attempts(job_id)
        return next((attempt for attempt in reversed(attempts) if attempt.ended_at is not None), None)


def _settled(status: Status) -> bool:
    return status.terminal or status is Status.PAUSED


def _save(stored: ArtifactStore, name: tuple[str, int, int, str], target: Path) -> None:
    """Copy an artifact to a file; an existing one is replaced once the copy is complete."""
    partial = target.with_name(f".{target.name}.{time.monotonic_ns():x}")
    try:
        with stored.open(*name).content as content, partial.open("wb") as file:
            shutil.copyfileobj(content, file)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
