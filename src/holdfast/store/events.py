"""The history of a job: read by page, appended in batches by the owner of a running attempt."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from holdfast.errors import Invalid, NotFound, TooLarge
from holdfast.model import Event, Json, Lease, NewEvent, Status
from holdfast.store.database import Database, Row, json_text
from holdfast.store.rows import known_id, to_event, to_json

MAX_APPEND = 4 * 1024 * 1024


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    items: Sequence[Event]
    next_after: int | None


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """`landed` (applied now), `repeated` (applied before), or `lost` (the lease is lost: write nothing).

    `usage` and `log_bytes` are the job's new totals over all attempts.
    """

    answer: Literal["landed", "repeated", "lost"]
    usage: Mapping[str, float] = {}
    log_bytes: int = 0


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The last `seq` of a job's history, read together with the status that says whether more may follow."""

    tenant: str
    seq: int
    status: Status
    reason: str | None


class Events:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, job_id: str, *, tenant: str = "default", after: int = 0, limit: int = 1000) -> EventPage:
        """Return events after `after`, in order. `next_after` is set while more can be read at once."""
        if not 1 <= limit <= 1000:
            raise Invalid("limit", f"{limit} is not between 1 and 1000")
        if after < 0:
            raise Invalid("after", f"{after} is below 0")
        job_id = known_id(job_id)
        if not await self._database.read("find_job", id=job_id, tenant=tenant):
            raise NotFound("job", job_id)
        rows = await self._database.read("list_events", id=job_id, after=after, limit=limit + 1)
        items = [to_event(row) for row in rows[:limit]]
        return EventPage(items=items, next_after=items[-1].seq if len(rows) > limit else None)

    async def heads(self, ids: Sequence[str]) -> Mapping[str, Head]:
        """Return the heads of these jobs' histories in one statement; deleted jobs are left out."""
        rows = await self._database.read("heads", ids=list(ids))
        return {
            row["id"]: Head(
                tenant=row["tenant"], seq=row["seq"], status=Status(row["status"]), reason=row["error_code"]
            )
            for row in rows
        }

    async def append(
        self,
        lease: Lease,
        batch: int,
        events: Sequence[NewEvent],
        *,
        offsets: tuple[int, int],
        old_offsets: tuple[int, int],
        progress: Json = None,
        usage: Mapping[str, float] | None = None,
        log_bytes: int = 0,
    ) -> Appended:
        """Append batch n and move the offsets of stdout and stderr with it, or change nothing.

        It is applied only after batch n - 1, with the old offsets and the lease's token, so a retry repeats nothing and
        an adopter continues exactly there. `log_bytes` is what this batch adds to the job's log, to check its cap.
        """
        rows = [_row(event) for event in events]
        if sum(len(row["data"]) for row in rows) > MAX_APPEND:
            raise TooLarge("events", f"over {MAX_APPEND} bytes in one batch")
        landed = await self._database.rows(
            "append_events",
            id=lease.id,
            token=lease.token,
            batch=batch,
            events=rows,
            stdout_offset=offsets[0],
            stderr_offset=offsets[1],
            old_stdout_offset=old_offsets[0],
            old_stderr_offset=old_offsets[1],
            progress=None if progress is None else json_text(progress),
            usage=dict(usage) if usage else None,
            log_bytes=log_bytes,
        )
        if landed:
            return _appended("landed", landed[0])
        state = await self._database.read("append_state", id=lease.id, token=lease.token)
        if state and state[0]["batch"] >= batch:
            return _appended("repeated", state[0])
        if state:
            raise Invalid("batch", f"{batch} does not follow batch {state[0]['batch']}, or its old offsets differ")
        return Appended(answer="lost")

    async def log_bytes(self, job_id: str) -> int:
        """Return how many bytes of log are stored for a job, over all attempts."""
        rows = await self._database.read("log_bytes", id=job_id)
        return int(rows[0]["log_bytes"]) if rows else 0


def _appended(answer: Literal["landed", "repeated"], row: Row) -> Appended:
    return Appended(answer=answer, usage=to_json(row["usage"], {}), log_bytes=row["log_bytes"])


def _row(event: NewEvent) -> dict[str, str]:
    try:
        row = {"type": event.type, "data": json_text(event.data)}
    except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError) as error:
        raise Invalid("data", f"cannot be written as JSON ({error})") from None
    if event.task is not None:
        row["task"] = event.task
    return row
