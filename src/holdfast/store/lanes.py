"""Lanes: one job at a time, in order.

`settle_lanes` is the one function that moves a lane. Every path that ends, pauses, dismisses, cancels, resolves,
deletes or releases a job of a lane calls it, in the same transaction, with the lane's row locked. It decides from the
current state, so an extra call changes nothing.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import Invalid, NotFound
from holdfast.model import Check, Lane, Status
from holdfast.store.audit import By, record
from holdfast.store.database import Database, Row, Tx, json_text
from holdfast.store.notify import Notifications, work_topic
from holdfast.store.rows import to_check, to_lane
from holdfast.submission import parse_check

LaneKey = tuple[str, str]


def keys(lanes: Iterable[LaneKey]) -> list[dict[str, str]]:
    return [{"tenant": tenant, "lane": lane} for tenant, lane in sorted(set(lanes))]


async def lock_lanes(tx: Tx, lanes: Iterable[LaneKey]) -> int:
    """Lock lanes in key order; the next statement of this transaction sees what earlier lockers committed.

    Return how many exist: an idle lane may have been deleted.
    """
    return len(await tx.rows("lock_lanes", lanes=keys(lanes)))


async def lock_lanes_and_jobs(tx: Tx, lanes: Sequence[LaneKey], ids: Iterable[str]) -> int:
    """Lock lanes, then in id order these jobs and every job that moving the lanes may touch: holders and next ones.

    While the lanes are locked, that set of jobs cannot change, so `settle_lanes` later waits for no job's lock.
    Return how many lanes exist.
    """
    found = await lock_lanes(tx, lanes)
    await tx.rows("lock_jobs", ids=sorted({*ids, *await lane_jobs(tx, lanes)}))
    return found


async def lane_jobs(tx: Tx, lanes: Sequence[LaneKey]) -> set[str]:
    """Return the jobs that settling these locked lanes may change."""
    states = await tx.rows("lane_states", lanes=keys(lanes))
    return {job for lane in states for job in (lane["holder"], lane["next_id"]) if job is not None}


@dataclass(frozen=True)
class Step:
    """What to do with a lane: close the gate of its holder, or not; then open one job as its holder, or none."""

    shut: str | None = None
    open: str | None = None
    holder: str | None = None


def decide(lane: Row) -> Step:
    """Decide which job holds a lane. Pure: takes a row of `lane_states` and returns what to do."""
    stopped = bool(lane["paused"] or lane["blocked"])
    holder = lane["holder"]
    if holder is not None and lane["holder_status"] == Status.RUNNING:
        return Step(holder=holder)
    if holder is not None and lane["holder_status"] == Status.QUEUED:
        gate = lane["holder_gate"]
        if lane["holder_started"]:
            # A retry keeps its lane, whatever waits after it.
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
    """Advance locked lanes; return the queues that got a claimable job."""
    states = await tx.rows("lane_states", lanes=keys(lanes))
    steps = [(lane, decide(lane)) for lane in states]
    to_shut = [step.shut for _, step in steps if step.shut]
    shut = {row["id"] for row in await tx.rows("close_gates", ids=to_shut)} if to_shut else set()
    # A holder whose gate could not be closed was claimed meanwhile: it keeps the lane.
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
    opened: Sequence[Row] = await tx.rows("open_gates", ids=to_open) if to_open else ()
    return {row["queue"] for row in opened}


async def _seen(tx: Tx, tenant: str, lane: str) -> Lane:
    (row,) = await tx.rows("list_lanes", tenant=tenant, lane=lane, after_lane=None, limit=1)
    return to_lane(row)


def _brief(check: Check | None) -> dict[str, Any] | None:
    """Return a check for the audit trail, without its arguments: they may hold a secret."""
    if check is None:
        return None
    return {"program": check.command[0], "arguments": len(check.command) - 1, "timeout": check.timeout}


class Lanes:
    """Lanes as people see and control them."""

    def __init__(self, database: Database, notifications: Notifications) -> None:
        self._database = database
        self._notifications = notifications

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

    async def pause(self, lane: str, *, tenant: str = "default", by: By = None) -> Lane:
        """Stop claims from a lane; its running job continues. A lane may be paused before its first job."""
        return await self._set_paused(lane, tenant, True, by)

    async def resume(self, lane: str, *, tenant: str = "default", by: By = None) -> Lane:
        return await self._set_paused(lane, tenant, False, by)

    async def set_check(
        self, lane: str, check: Mapping[str, Any] | None, *, tenant: str = "default", by: By = None
    ) -> Lane:
        """Set the command with which a worker checks, before each start, that this lane is ready; None removes it.

        `check` is like {"command": ["pg_isready"], "timeout": 10}. A lane may get one before its first job.
        """
        readiness = None if check is None else json_text(parse_check(check))

        async def change(tx: Tx) -> Lane | None:
            if not await lock_lanes(tx, [(tenant, lane)]):
                return None
            before = (await _seen(tx, tenant, lane)).check
            await tx.rows("set_lane_check", tenant=tenant, lane=lane, readiness=readiness)
            seen = await _seen(tx, tenant, lane)
            if before != seen.check:
                await record(tx, by, "lane.check", lane, tenant=tenant, before=_brief(before), after=_brief(seen.check))
            return seen

        return await self._change(tenant, lane, change)

    async def check_of(self, tenant: str, lane: str) -> Check | None:
        """Return the check that a worker runs before it starts a job of this lane."""
        rows = await self._database.read("lane_check", tenant=tenant, lane=lane)
        return to_check(rows[0]["readiness"]) if rows else None

    async def _set_paused(self, lane: str, tenant: str, paused: bool, by: By) -> Lane:
        key = (tenant, lane)
        queues: set[str] = set()

        async def change(tx: Tx) -> Lane | None:
            nonlocal queues
            if not await lock_lanes_and_jobs(tx, [key], []):
                return None
            (before,) = await tx.rows("lane_states", lanes=keys([key]))
            await tx.rows("pause_lane", tenant=tenant, lane=lane, paused=paused)
            queues = await settle_lanes(tx, [key])
            if bool(before["paused"]) != paused:
                action = "lane.pause" if paused else "lane.resume"
                after = {"paused": paused}
                await record(tx, by, action, lane, tenant=tenant, before={"paused": not paused}, after=after)
            return await _seen(tx, tenant, lane)

        changed = await self._change(tenant, lane, change)
        self._notifications.post(work_topic(queue) for queue in queues)
        return changed

    async def _change(self, tenant: str, lane: str, change: Callable[[Tx], Awaitable[Lane | None]]) -> Lane:
        """Create a lane if needed, and change it; repeat if it was deleted in between."""
        while True:
            await self.ensure([(tenant, lane)])
            changed = await self._database.transact(change)
            if changed is not None:
                return changed

    async def ensure(self, lanes: Iterable[LaneKey]) -> None:
        """Create missing lanes in a separate transaction: a lock taken here would be out of order."""
        missing = await self._database.read("missing_lanes", lanes=keys(lanes))
        if missing:
            await self._database.rows("ensure_lanes", lanes=keys((row["tenant"], row["lane"]) for row in missing))
