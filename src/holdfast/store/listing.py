"""Lists of jobs, newest first, page by page. The order never changes, so a cursor neither skips nor repeats.

A page is read by a scan along an index in the order of the list. Each filter has one (`_indexes`). With several filters
the most selective one is not known beforehand, so their scans alternate, in parts that grow, until one of them has
filled the page or reached its end: a page costs as much as the best scan, times the number of scans.
"""

import base64
import binascii
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import msgspec

from holdfast.errors import Invalid
from holdfast.model import Job, Status
from holdfast.store.database import Database
from holdfast.store.rows import to_job
from holdfast.timing import from_micros, to_micros

IndexName = Literal["newest", "kind", "label", "lane", "status"]
Range = Mapping[str, str | None]
"""A status and a queue."""

FIRST_ID = str(uuid.UUID(int=0))
MOST_ROWS = 10_000
"""The most rows of one scan: another read on the same thread waits for no more than this."""


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    items: Sequence[Job]
    next_cursor: str | None


@dataclass(frozen=True, kw_only=True)
class Filters:
    """What a job must match to be listed; None matches anything."""

    tenant: str
    statuses: Sequence[Status] = ()
    kind: str | None = None
    queue: str | None = None
    lane: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    since: datetime | None = None
    until: datetime | None = None

    def parameters(self) -> dict[str, Any]:
        return {
            "tenant": self.tenant,
            "statuses": [str(status) for status in self.statuses] or None,
            "kind": self.kind,
            "queue": self.queue,
            "lane": self.lane,
            "labels": dict(self.labels) or None,
            "label": "=".join(next(iter(self.labels.items()), ())),
            "since_at": self.since,
        }


async def list_jobs(database: Database, filters: Filters, *, limit: int, cursor: str | None) -> JobPage:
    """One page."""
    if not 1 <= limit <= 1000:
        raise Invalid("limit", f"{limit} is not between 1 and 1000")
    for name, at in (("since", filters.since), ("until", filters.until)):
        if at is not None and at.tzinfo is None:
            raise Invalid(name, "has no time zone")
    before = _earlier(_read_cursor(cursor), (filters.until, FIRST_ID))
    ranges = await _ranges(database, filters)
    scans = [_IndexScan(database, filters, index, ranges, before, limit + 1) for index in _indexes(filters)]
    jobs = await _first_complete(scans, limit + 1)
    return JobPage(items=jobs[:limit], next_cursor=_cursor(jobs[limit - 1]) if len(jobs) > limit else None)


def _indexes(filters: Filters) -> Sequence[IndexName]:
    """Return the indexes along which these jobs can be found."""
    given: dict[IndexName, bool] = {
        "lane": filters.lane is not None,
        "label": bool(filters.labels),
        "kind": filters.kind is not None,
        "status": bool(filters.statuses) or filters.queue is not None,
    }
    return [index for index, usable in given.items() if usable] or ["newest"]


async def _ranges(database: Database, filters: Filters) -> Sequence[Range]:
    """Return the statuses and queues for the index `status`, whose indexes are by both; running jobs are one range."""
    statuses = [str(status) for status in filters.statuses or Status]
    if filters.queue is not None:
        return [{"status": status, "queue": filters.queue} for status in statuses]
    if not filters.statuses:
        return []
    found = await database.read("list_ranges", tenant=filters.tenant, statuses=statuses)
    running: list[Range] = [{"status": status, "queue": None} for status in statuses if status == Status.RUNNING]
    return running + [{"status": row["status"], "queue": row["queue"]} for row in found]


async def _first_complete(scans: "Sequence[_IndexScan]", size: int) -> Sequence[Job]:
    while True:
        for scan in scans:
            if await scan.read_more(size):
                return list(scan.found.values())
        size = min(size * 4, MOST_ROWS)


Position = tuple[datetime | None, str]


class _IndexScan:
    """A scan along one index: the jobs that match, and its position."""

    def __init__(
        self,
        database: Database,
        filters: Filters,
        index: IndexName,
        ranges: Sequence[Range],
        before: Position,
        limit: int,
    ) -> None:
        self.found: dict[str, Job] = {}  # By id: a job that moved between two reads may be found twice.
        self._database = database
        self._given = {**filters.parameters(), "index_name": index, "ranges": list(ranges), "limit": limit}
        self._before = before
        self._limit = limit

    async def read_more(self, size: int) -> bool:
        """Read `size` more rows; return whether the page is full or the scan has ended."""
        before_at, before_id = self._before
        rows = await self._database.read(
            "list_jobs", **self._given, scan=size, before_at=before_at, before_id=before_id
        )
        self.found.update((row["id"], to_job(row)) for row in rows if row["fits"])
        if len(self.found) >= self._limit or not rows or rows[-1]["scanned"] < size:
            return True
        self._before = rows[-1]["requested_at"], rows[-1]["id"]
        return False


def _cursor(job: Job) -> str:
    return base64.urlsafe_b64encode(f"{to_micros(job.requested_at)}.{job.id}".encode()).decode()


def _read_cursor(cursor: str | None) -> Position:
    if cursor is None:
        return None, FIRST_ID
    try:
        micros, _, job_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition(".")
        return from_micros(int(micros)), str(uuid.UUID(job_id))
    except (ValueError, binascii.Error, OverflowError):
        raise Invalid("cursor", "is not a valid cursor") from None


def _earlier(one: Position, other: Position) -> Position:
    """Return the position that is further down the list; None is before its start."""
    return min((p for p in (one, other) if p[0] is not None), default=one)
