"""Lanes: one job at a time, in order.

`settle_lanes` is the one function that moves a lane. Every path that ends, pauses, dismisses, cancels, resolves,
deletes or releases a job of a lane calls it, in the same transaction, with the lane's row locked. It looks at how
things stand, so calling it once too often changes nothing.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import Invalid, NotFound
from holdfast.model import Check, Lane, Status
from holdfast.store.database import Database, Row, Tx, json_text
from holdfast.store.rows import to_check, to_lane
from holdfast.store.wake import Wake, work
from holdfast.submission import parse_check

LaneKey = tuple[str, str]


def keys(lanes: Iterable[LaneKey]) -> list[dict[str, str]]:
    return [{"tenant": tenant, "lane": lane} for tenant, lane in sorted(set(lanes))]


async def lock_lanes(tx: Tx, lanes: Iterable[LaneKey]) -> int:
    """Lock lanes in key order; the next statement of this transaction sees what their last holder left.

    Return how many there are: one that is idle may have been forgotten.
    """
    return len(await tx.rows("lock_lanes", lanes=keys(lanes)))


async def lock_lanes_and_jobs(tx: Tx, lanes: Sequence[LaneKey], ids: Iterable[str]) -> int:
    """Lock lanes, then in id order these jobs and every job that moving the lanes may touch: holders and next ones.

    While the lanes are locked nobody else changes who these are, so `settle_lanes` later waits for no job's lock.
    Return how many lanes there are.
    """
    found = await lock_lanes(tx, lanes)
    await tx.rows("lock_jobs", ids=sorted({*ids, *await lane_jobs(tx, lanes)}))
    return found


async def lane_jobs(tx: Tx, lanes: Sequence[LaneKey]) -> set[str]:
    """The jobs that moving these locked lanes may touch."""
    states = await tx.rows("lane_states", lanes=keys(lanes))
    return {job for lane in states for job in (lane["holder"], lane["next_id"]) if job is not None}


@dataclass(frozen=True)
class Step:
    """What a lane needs: perhaps shut the holder, then perhaps open one job and make it the holder."""

    shut: str | None = None
    open: str | None = None
    holder: str | None = None


def decide(lane: Row) -> Step:
    """Decide who holds a lane. Pure: from the row of `lane_states` to what is to be done."""
    stopped = bool(lane["paused"] or lane["blocked"])
    holder = lane["holder"]
    if holder is not None and lane["holder_status"] == Status.RUNNING:
        return Step(holder=holder)
    if holder is not None and lane["holder_status"] == Status.QUEUED:
        gate = lane["holder_gate"]
        if lane["holder_started"]:
            # A retry keeps its lane, whatever waits behind it.
            if gate == "open" and stopped:
                return Step(shut=holder, holder=holder)
            return Step(open=holder if gate == "lane" and not stopped else None, holder=holder)
        if gate == "open":
            overtaken = lane["next_id"] is not None and lane["next_position"] < lane["holder_position"]
            if stopped:
                return Step(shut=holder)
            return Step(shut=holder, open=lane["next_id"], holder=lane["next_id"]) if overtaken else Step(holder=holder)
    if stopped or lane["next_id"] is None:
        return Step()
    return Step(open=lane["next_id"], holder=lane["next_id"])


async def settle_lanes(tx: Tx, lanes: Iterable[LaneKey]) -> set[str]:
    """Move locked lanes on; return the queues that got something to claim."""
    states = await tx.rows("lane_states", lanes=keys(lanes))
    steps = [(lane, decide(lane)) for lane in states]
    to_shut = [step.shut for _, step in steps if step.shut]
    shut = {row["id"] for row in await tx.rows("shut_jobs", ids=to_shut)} if to_shut else set()
    # A holder that could not be shut was claimed in this moment: it keeps the lane.
    steps = [
        (lane, step if step.shut is None or step.shut in shut else Step(holder=lane["holder"])) for lane, step in steps
    ]
    changed = [
        {"tenant": lane["tenant"], "lane": lane["lane"], "holder": step.holder}
        for lane, step in steps
        if step.holder != lane["holder"]
    ]
    if changed:
        await tx.rows("set_holders", rows=changed)
    to_open = [step.open for _, step in steps if step.open]
    opened: Sequence[Row] = await tx.rows("open_jobs", ids=to_open) if to_open else ()
    return {row["queue"] for row in opened}


async def _seen(tx: Tx, tenant: str, lane: str) -> Lane:
    (row,) = await tx.rows("list_lanes", tenant=tenant, lane=lane, after_lane=None, limit=1)
    return to_lane(row)


class Lanes:
    """Lanes as people see and steer them."""

    def __init__(self, database: Database, wake: Wake) -> None:
        self._database = database
        self._wake = wake

    async def get(self, lane: str, *, tenant: str = "default") -> Lane:
        found = await self._database.read("list_lanes", tenant=tenant, lane=lane, after_lane=None, limit=1)
        if not found:
            raise NotFound("lane", lane)
        return to_lane(found[0])

    async def list(self, *, tenant: str = "default", after: str | None = None, limit: int = 100) -> Sequence[Lane]:
        if not 1 <= limit <= 1000:
            raise Invalid("limit", f"{limit} is not between 1 and 1000")
        rows = await self._database.read("list_lanes", tenant=tenant, lane=None, after_lane=after, limit=limit)
        return [to_lane(row) for row in rows]

    async def pause(self, lane: str, *, tenant: str = "default") -> Lane:
        """Let nobody claim from a lane; what runs goes on. A lane may be paused before its first job."""
        return await self._set_paused(lane, tenant, True)

    async def resume(self, lane: str, *, tenant: str = "default") -> Lane:
        return await self._set_paused(lane, tenant, False)

    async def set_check(self, lane: str, check: Mapping[str, Any] | None, *, tenant: str = "default") -> Lane:
        """Say how a worker finds out, before each start, whether this lane is ready; None takes it back.

        `check` is like {"command": ["pg_isready"], "timeout": 10}. A lane may get one before its first job.
        """
        readiness = None if check is None else json_text(parse_check(check))

        async def change(tx: Tx) -> Lane | None:
            if not await lock_lanes(tx, [(tenant, lane)]):
                return None
            await tx.rows("set_lane_check", tenant=tenant, lane=lane, readiness=readiness)
            return await _seen(tx, tenant, lane)

        return await self._change(tenant, lane, change)

    async def check_of(self, tenant: str, lane: str) -> Check | None:
        """The check that a worker runs before it starts a job of this lane."""
        rows = await self._database.read("lane_check", tenant=tenant, lane=lane)
        return to_check(rows[0]["readiness"]) if rows else None

    async def _set_paused(self, lane: str, tenant: str, paused: bool) -> Lane:
        key = (tenant, lane)
        queues: set[str] = set()

        async def change(tx: Tx) -> Lane | None:
            nonlocal queues
            if not await lock_lanes_and_jobs(tx, [key], []):
                return None
            await tx.rows("pause_lane", tenant=tenant, lane=lane, paused=paused)
            queues = await settle_lanes(tx, [key])
            return await _seen(tx, tenant, lane)

        changed = await self._change(tenant, lane, change)
        self._wake.post(work(queue) for queue in queues)
        return changed

    async def _change(self, tenant: str, lane: str, change: Callable[[Tx], Awaitable[Lane | None]]) -> Lane:
        """Make a lane that is not there, and change it; once more, if it was forgotten in between."""
        while True:
            await self.ensure([(tenant, lane)])
            changed = await self._database.transact(change)
            if changed is not None:
                return changed

    async def ensure(self, lanes: Iterable[LaneKey]) -> None:
        """Make rows for lanes that have none, in a transaction of its own: a lock taken here would be out of order."""
        missing = await self._database.read("missing_lanes", lanes=keys(lanes))
        if missing:
            await self._database.rows("ensure_lanes", lanes=keys((row["tenant"], row["lane"]) for row in missing))
