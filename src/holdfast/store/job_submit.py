"""Submitting jobs, and reading and listing them."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from holdfast.errors import (
    Conflict,
    Invalid,
    NeedFailed,
    NotFound,
    QueueFull,
    ReplayedJobDeleted,
    StoreError,
)
from holdfast.function_defaults import FunctionDefaults
from holdfast.model import FUNCTION, Gate, Job, Status
from holdfast.store import notify
from holdfast.store.database import Database
from holdfast.store.error_mapping import id_taken, id_unusable
from holdfast.store.gates import Gates
from holdfast.store.listing import Filters, JobPage, list_jobs
from holdfast.store.rows import known_id, to_functions, to_job
from holdfast.store.submit_parts import divisible, submit_in_parts
from holdfast.submission import QUEUE, Accepted, Batch, Submission, build_batch, complete

T = TypeVar("T")

ID_DIGITS = 32
TAIL_DIGITS = 6
"""The fewest digits by which the end of an id is searched."""
SEVERAL = 2
FUNCTIONS_SECONDS = 1.0
CHECKED_AT_ONCE = 64
"""Batches up to this size are checked on the event loop; a larger one would block every other request."""


async def _gathered(
    jobs: Sequence[Submission | Mapping[str, Any]],
    tenant: str,
    key: str | None,
    sent: Sequence[Any] | None,
    defaults: Mapping[str, Any],
    functions: Mapping[str, FunctionDefaults] | None,
) -> Batch:
    if len(jobs) <= CHECKED_AT_ONCE:
        return build_batch(jobs, tenant, key, sent, defaults, functions)
    return await asyncio.to_thread(build_batch, jobs, tenant, key, sent, defaults, functions)


class JobSubmit:
    """What a caller does before a job runs, and what it reads."""

    def __init__(
        self, database: Database, gates: Gates, wake_up: notify.Notifications, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.defaults = dict(defaults or {})
        """Values from this process's settings for fields that a job leaves out."""
        self._functions: Mapping[str, FunctionDefaults] = {}
        self._functions_until = 0.0
        self._database = database
        self._gates = gates
        self._notifications = wake_up

    async def submit(
        self,
        job: Submission | Mapping[str, Any],
        *,
        tenant: str = "default",
        key: str | None = None,
        sent: Sequence[Any] | None = None,
        functions: Mapping[str, FunctionDefaults] | None = None,
    ) -> Job:
        """Accept one job: when this returns, it is in the database. An existing job is returned as `reused`.

        `functions` are those that the caller's own application knows: theirs hold where none or older ones are
        registered.
        """
        batch = await _gathered([job], tenant, key, sent, self.defaults, functions)
        with_commit = self._notifications.reserve()
        topics = ([] if _given_id(job) else [notify.SORTS_LAST]) if with_commit else None
        row = await self._or_name_taken_id(batch, self._database.submit_one(batch, topics=topics))
        if row["asked"] is not None:
            sorts_last = not row["priority"] and not _given_id(job)
            sent_already = with_commit and not row["reused"]
            self._notifications.post({notify.work_topic(row["queue"])}, sorts_last=sorts_last, sent=sent_already)
        if row["gate"] != Gate.UNRESOLVED:
            return msgspec.structs.replace(to_job(row), reused=row["reused"])
        lane = row["lane"]
        await self._gates.follow_up([] if lane is None else [(tenant, lane)], [row["id"]] if lane is None else [])
        return msgspec.structs.replace(await self.get(row["id"], tenant=tenant), reused=row["reused"])

    async def submit_many(
        self, jobs: Sequence[Submission | Mapping[str, Any]], *, tenant: str = "default", key: str | None = None
    ) -> Sequence[str]:
        """Accept many jobs in one transaction, all or none; return their ids in the order given."""
        return [accepted.id for accepted in await self.accept(jobs, tenant=tenant, key=key)]

    async def accept(
        self,
        jobs: Sequence[Submission | Mapping[str, Any]],
        *,
        tenant: str = "default",
        key: str | None = None,
        sent: Sequence[Any] | None = None,
        functions: Mapping[str, FunctionDefaults] | None = None,
    ) -> Sequence[Accepted]:
        """Accept many jobs in one transaction, all or none.

        `key` is an idempotency key: for 24 hours, the same call with the same key returns the same ids. If the jobs
        were built from a request, `sent` is that request, and calls are compared by it.
        """
        if self._database.transaction_waits and divisible(jobs, key):
            batch, existing = await submit_in_parts(
                self._database, jobs, lambda part: build_batch(part, tenant, None, None, self.defaults, functions)
            )
        else:
            batch = await _gathered(jobs, tenant, key, sent, self.defaults, functions)
            existing = await self._or_name_taken_id(batch, self._database.submit(batch))
        answer = batch.answer(existing)
        if existing and existing[0]["asked"] is None:
            return answer
        completed = await self._completed(batch)
        self._notifications.post(
            {notify.work_topic(job.queue or QUEUE) for job in completed},
            sorts_last=not _sorts_first(completed, jobs),
        )
        await self._gates.follow_up(
            {(tenant, job.lane) for job in completed if job.lane is not None},
            [job.id for job in completed if job.id is not None and job.lane is None and job.needs],
        )
        return answer

    async def _or_name_taken_id(self, batch: Batch, submit: Awaitable[T]) -> T:
        """Await a submit; if it fails because an id is taken, raise an error that names the id."""
        try:
            return await submit
        except (ReplayedJobDeleted, NeedFailed, QueueFull):
            raise
        except Conflict:
            await self.refuse_taken_ids(batch)
            raise

    async def _completed(self, batch: Batch) -> Sequence[Submission]:
        """Return a batch's jobs with their defaults. Registrations may be a second old: this is for hints only."""
        names = {job.spec["name"] for job in batch.jobs if job.runner == FUNCTION}
        if names and time.monotonic() >= self._functions_until:
            self._functions_until = time.monotonic() + FUNCTIONS_SECONDS
            with contextlib.suppress(StoreError):  # The jobs are accepted: the call must not fail now.
                self._functions = to_functions(await self._database.read("function_defaults"))
        if names.isdisjoint(self._functions) and names.isdisjoint(batch.functions):
            return batch.jobs
        with contextlib.suppress(Invalid):  # A registration has changed meanwhile.
            if len(batch.jobs) <= CHECKED_AT_ONCE:
                return complete(batch, self._functions).jobs
            return (await asyncio.to_thread(complete, batch, self._functions)).jobs
        return batch.jobs

    async def get(self, job_id: str, *, tenant: str = "default") -> Job:
        found = await self._database.read("get_job", id=known_id(job_id), tenant=tenant)
        if not found:
            raise NotFound("job", job_id)
        return to_job(found[0])

    async def list(
        self,
        *,
        tenant: str = "default",
        status: Sequence[Status] = (),
        kind: str | None = None,
        queue: str | None = None,
        lane: str | None = None,
        labels: Mapping[str, str] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> JobPage:
        """List jobs, newest first. The order never changes, so a cursor neither skips nor repeats."""
        filters = Filters(
            tenant=tenant,
            statuses=[Status(one) for one in dict.fromkeys(status)],
            kind=kind,
            queue=queue,
            lane=lane,
            labels=labels or {},
            since=since,
            until=until,
        )
        return await list_jobs(self._database, filters, limit=limit, cursor=cursor)

    async def with_id_part(self, part: str, *, tenant: str = "default", limit: int = 100) -> Sequence[Job]:
        """Return jobs whose ids begin with `part`, or end with it if it is long enough, by id.

        Several that begin with it are enough: then the ends are not searched, which reads all ids of the tenant.
        """
        digits = part.replace("-", "").lower()
        if not digits or len(digits) > ID_DIGITS or not set(digits) <= set("0123456789abcdef"):
            raise Invalid("id", f"{part[:60]!r} is not a part of an id")
        least, most = (str(uuid.UUID(digits.ljust(ID_DIGITS, fill))) for fill in "0f")
        found = list(await self._database.read("jobs_between", tenant=tenant, least=least, most=most, limit=limit))
        if TAIL_DIGITS <= len(digits) < ID_DIGITS and len(found) < min(limit, SEVERAL):
            tail = digits[-TAIL_DIGITS:]
            found += await self._database.read_long("jobs_ending", tenant=tenant, tail=tail, digits=digits, limit=limit)
        jobs = {row["id"]: to_job(row) for row in found}
        return [jobs[job_id] for job_id in sorted(jobs)][:limit]

    async def existing(self, ids: Sequence[str]) -> frozenset[str]:
        """Return which of these jobs exist, in any tenant."""
        found = await self._database.read("existing_jobs", ids=[job_id for job_id in ids if _is_id(job_id)])
        return frozenset(row["id"] for row in found)

    async def refuse_taken_ids(self, batch: Batch) -> None:
        """Raise an error that names the id because of which the database refused a batch."""
        for row in await self._database.read("existing_jobs", ids=list(batch.ids)):
            raise id_taken(row["id"]) if row["tenant"] == batch.tenant else id_unusable(row["id"])


def _is_id(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def _sorts_first(jobs: Sequence[Submission], asked: Sequence[Submission | Mapping[str, Any]]) -> bool:
    """Return whether a job may sort before jobs that already wait: by its priority, or an id that the caller chose."""
    return any(job.priority is not UNSET and job.priority for job in jobs) or any(_given_id(job) for job in asked)


def _given_id(job: Submission | Mapping[str, Any]) -> bool:
    return (job.id if isinstance(job, Submission) else job.get("id")) is not None
