"""Submitting jobs, and reading and listing them."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from holdfast.errors import (
    Conflict,
    Invalid,
    NeedFailed,
    NotFound,
    QueueFull,
    ReplayedJobDeleted,
    StoreError,
)
from holdfast.model import FUNCTION, Gate, Job, Status
from holdfast.store import notify
from holdfast.store.database import Database
from holdfast.store.error_mapping import id_taken, id_unusable
from holdfast.store.gates import Gates
from holdfast.store.listing import Filters, JobPage, list_jobs
from holdfast.store.rows import known_id, to_job
from holdfast.submission import QUEUE, Accepted, Batch, Submission, build_batch

T = TypeVar("T")

ID_DIGITS = 32
QUEUES_SECONDS = 1.0
CHECKED_AT_ONCE = 64
"""Batches up to this size are checked on the event loop; a larger one would block every other request."""


async def _gathered(
    jobs: Sequence[Submission | Mapping[str, Any]],
    tenant: str,
    key: str | None,
    sent: Sequence[Any] | None,
    defaults: Mapping[str, Any],
) -> Batch:
    if len(jobs) <= CHECKED_AT_ONCE:
        return build_batch(jobs, tenant, key, sent, defaults)
    return await asyncio.to_thread(build_batch, jobs, tenant, key, sent, defaults)


class JobSubmit:
    """What a caller does before a job runs, and what it reads."""

    def __init__(
        self, database: Database, gates: Gates, wake_up: notify.Notifications, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.defaults = dict(defaults or {})
        """Values from this process's settings for fields that a job leaves out."""
        self._function_queues: Mapping[str, str] = {}
        self._function_queues_until = 0.0
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
        defaults: Mapping[str, Any] | None = None,
    ) -> Job:
        """Accept one job: when this returns, it is in the database. An existing job is returned as `reused`.

        `defaults` apply to fields that neither the job nor the registered defaults of its function set.
        """
        batch = await _gathered([job], tenant, key, sent, {**self.defaults, **(defaults or {})})
        row = await self._or_name_taken_id(batch, self._database.submit_one(batch))
        if row["asked"] is not None:
            self._notifications.post({notify.work_topic(row["queue"])}, sorts_last=not _sorts_first(batch, [job]))
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
        defaults: Mapping[str, Any] | None = None,
    ) -> Sequence[Accepted]:
        """Accept many jobs in one transaction, all or none.

        `key` is an idempotency key: for 24 hours, the same call with the same key returns the same ids. If the jobs
        were built from a request, `sent` is that request, and calls are compared by it.
        """
        batch = await _gathered(jobs, tenant, key, sent, {**self.defaults, **(defaults or {})})
        existing = await self._or_name_taken_id(batch, self._database.submit(batch))
        answer = batch.answer(existing)
        if existing and existing[0]["asked"] is None:
            return answer
        self._notifications.post(
            {notify.work_topic(queue) for queue in await self._queues_of(batch)},
            sorts_last=not _sorts_first(batch, jobs),
        )
        await self._gates.follow_up(
            {(tenant, job.lane) for job in batch.jobs if job.lane is not None},
            [job.id for job in batch.jobs if job.id is not None and job.lane is None and job.needs],
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

    async def _queues_of(self, batch: Batch) -> set[str]:
        """Return the queues of a batch's jobs. Registrations may be a second old: a notification is only a hint."""
        queues = {job.queue for job in batch.jobs if job.queue is not None}
        without_queue = {job.capability for job in batch.jobs if job.queue is None}
        named = any(capability.startswith(f"{FUNCTION}:") for capability in without_queue)
        if named and time.monotonic() >= self._function_queues_until:
            self._function_queues_until = time.monotonic() + QUEUES_SECONDS
            with contextlib.suppress(StoreError):  # The jobs are accepted: the call must not fail now.
                rows = await self._database.read("function_defaults")
                found = {f"{FUNCTION}:{row['function']}": msgspec.json.decode(row["defaults"]) for row in rows}
                self._function_queues = {name: has["queue"] for name, has in found.items() if "queue" in has}
        otherwise = batch.defaults.get("queue", QUEUE)
        return queues | {self._function_queues.get(capability, otherwise) for capability in without_queue}

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

    async def with_prefix(self, prefix: str, *, tenant: str = "default", limit: int = 100) -> Sequence[Job]:
        """Return jobs whose ids begin with `prefix`, by id."""
        digits = prefix.replace("-", "").lower()
        if not digits or len(digits) > ID_DIGITS or not set(digits) <= set("0123456789abcdef"):
            raise Invalid("id", f"{prefix[:60]!r} is not the beginning of an id")
        least, most = (str(uuid.UUID(digits.ljust(ID_DIGITS, fill))) for fill in "0f")
        rows = await self._database.read("jobs_between", tenant=tenant, least=least, most=most, limit=limit)
        return [to_job(row) for row in rows]

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


def _sorts_first(batch: Batch, asked: Sequence[Submission | Mapping[str, Any]]) -> bool:
    """Return whether a job may sort before jobs that already wait: by its priority, or an id that the caller chose."""
    return any(job.priority for job in batch.jobs) or any(_given_id(job) for job in asked)


def _given_id(job: Submission | Mapping[str, Any]) -> bool:
    return (job.id if isinstance(job, Submission) else job.get("id")) is not None
