"""Lists of jobs, newest first, page by page. The order never changes, so a cursor neither skips nor repeats."""

import base64
import binascii
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from holdfast.errors import Invalid
from holdfast.model import Job, Status
from holdfast.store.database import Database
from holdfast.store.rows import to_job
from holdfast.timing import from_micros, to_micros

RARE = {
    Status.RUNNING: "list_running",
    **dict.fromkeys((Status.PAUSED, Status.FAILED, Status.TIMED_OUT, Status.CANCELLED), "list_ended_badly"),
}
"""Statuses with an index of their own. The few among a million are found there; from the newest back takes seconds."""


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    items: Sequence[Job]
    next_cursor: str | None


async def list_jobs(
    database: Database, status: Sequence[Status], *, limit: int, cursor: str | None, **filters: Any
) -> JobPage:
    """One page. `filters` are the parameters of the statements, None where there is none."""
    if not 1 <= limit <= 1000:
        raise Invalid("limit", f"{limit} is not between 1 and 1000")
    for name in ("since_at", "until_at"):
        if filters[name] is not None and filters[name].tzinfo is None:
            raise Invalid(name.removesuffix("_at"), "has no time zone")
    before_at, before_id = _read_cursor(cursor)
    given = {**filters, "before_at": before_at, "before_id": before_id, "limit": limit + 1}
    jobs = await _read(database, [Status(one) for one in dict.fromkeys(status)], given)
    return JobPage(items=jobs[:limit], next_cursor=_cursor(jobs[limit - 1]) if len(jobs) > limit else None)


async def _read(database: Database, statuses: Sequence[Status], given: Mapping[str, Any]) -> Sequence[Job]:
    if not statuses or not RARE.keys() >= set(statuses):
        wanted = [str(status) for status in statuses] or None
        return [to_job(row) for row in await database.read("list_jobs", **given, statuses=wanted)]
    found = []
    for status in statuses:
        said = {} if status is Status.RUNNING else {"status": str(status)}
        found += [to_job(row) for row in await database.read(RARE[status], **given, **said)]
    # A job that moved between two reads may have been seen twice.
    unique = {job.id: job for job in found}.values()
    return sorted(unique, key=lambda job: (job.requested_at, job.id), reverse=True)


def _cursor(job: Job) -> str:
    return base64.urlsafe_b64encode(f"{to_micros(job.requested_at)}.{job.id}".encode()).decode()


def _read_cursor(cursor: str | None) -> tuple[datetime | None, str | None]:
    if cursor is None:
        return None, None
    try:
        micros, _, job_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition(".")
        return from_micros(int(micros)), str(uuid.UUID(job_id))
    except (ValueError, binascii.Error, OverflowError):
        raise Invalid("cursor", "is not one that a list answered") from None
