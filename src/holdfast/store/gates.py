"""Gates: what a waiting job waits for, resolved when it changes, never while claiming.

Lock, then read: each change is one short transaction that locks the lane, then the jobs (with those they need) in id
order, and then reads with a fresh snapshot. A job that ends only sets `unsettled` on its own row; its dependants are
settled here, level by level. Every function is idempotent and safe to run concurrently.
"""

import logging
import re
from collections.abc import Iterable, Sequence

from holdfast.errors import LockTimeout, StoreError, one_line
from holdfast.store.database import Database, Row, Tx
from holdfast.store.lanes import LaneKey, Lanes, lane_jobs, lock_lanes, lock_lanes_and_jobs, settle_lanes
from holdfast.store.notify import Notifications, work_topic
from holdfast.store.outage import level_of
from holdfast.store.transitions import event, lock_keys

log = logging.getLogger(__name__)

BATCH = 200
KEY_SECONDS = 2
ROUNDS = 1000
MAX_NEED_ERROR = 500
"""Characters of a need's own error in the message of its dependants."""
BETWEEN = re.compile(r"needs job \S+, which (?:failed|timed out|was cancelled|was deleted): (?=needs job )")
CANCELLED = re.compile(r"cancelled(?: by request| before it started)?(?:: |$)")
"""The part of a cancelled job's message that precedes the caller's reason."""


def dependency_message(need_id: str, status: str | None, error: str | None = None) -> str:
    """Say why a dependant failed: the job that it needs, and that job's own error.

    In a chain of jobs the message names the direct dependency and the first job that failed, but none in between.
    """
    how = {"failed": "failed", "timed_out": "timed out", "cancelled": "was cancelled", None: "was deleted"}[status]
    message = f"needs job {need_id}, which {how}"
    prefix = (CANCELLED if status == "cancelled" else BETWEEN).match(error or "")
    cause = one_line((error or "")[prefix.end() if prefix else 0 :], MAX_NEED_ERROR)
    return f"{message}: {cause}" if cause else message


class Gates:
    def __init__(self, database: Database, lanes: Lanes, notifications: Notifications) -> None:
        self._database = database
        self._lanes = lanes
        self._notifications = notifications

    async def promote(self, limit: int = 1000) -> int:
        """Make delayed jobs claimable that are due; return how many."""
        rows = await self._database.rows("promote", limit=limit)
        self._notifications.post({work_topic(row["queue"]) for row in rows if row["gate"] == "open"})
        if any(row["gate"] == "unresolved" for row in rows):
            await self.resolve()
        return len(rows)

    async def resolve(self) -> int:
        """Resolve all unresolved and settle all unsettled jobs until none is left; return how many."""
        done = 0
        for _ in range(ROUNDS):
            found = await self._resolve_lanes() + await self._resolve_laneless() + await self._settle_all()
            if not found:
                break
            done += found
        return done

    async def follow_up(
        self, lanes: Iterable[LaneKey] = (), ids: Iterable[str] = (), *, settle: Iterable[str] = ()
    ) -> None:
        """Resolve after a committed change: these lanes, these jobs without one, and the dependants of `settle`.

        Callers resolve only what they changed, so that they do not wait for each other's work. If the database is
        unavailable or this process dies, a duty does it later.
        """
        lanes, ids, settle = set(lanes), list(ids), list(settle)
        try:
            while lanes or ids or settle:
                shown = [row for job_id in settle for row in await self._settle(job_id)]
                lanes |= {(row["tenant"], row["lane"]) for row in shown if row["lane"] is not None}
                ids += [row["id"] for row in shown if row["lane"] is None]
                ended = [*await self.resolve_lanes(sorted(lanes)), *await self._resolve_jobs(ids)]
                # A job that changed while it was settled is still unsettled, and the other caller need not settle it.
                settle = await self._unsettled([*settle, *ended, *(row["id"] for row in shown)])
                lanes, ids = set(), []
        except StoreError as error:
            log.log(level_of(error), "gates not resolved; a duty will retry: %s", error)

    async def repair(self, limit: int = 100) -> int:
        """Find gates that nothing will ever open, repair them, and count each one: it is a bug in holdfast."""
        stuck = await self._database.read("stuck_gates", limit=limit)
        repaired = 0
        for row in stuck:
            key = None if row["lane"] is None else (row["tenant"], row["lane"])
            changed = await self._repair_gate(key, row["id"], limit)
            if changed:
                log.error("repaired a stuck gate: %s of job %s, lane %s", row["what"], row["id"], key)
                repaired += 1
        self._database.counters.gate_repairs += repaired
        if repaired:
            await self.resolve()
        return repaired

    async def _repair_gate(self, key: LaneKey | None, job_id: str | None, limit: int) -> bool:
        async def change(tx: Tx) -> bool:
            if key is not None:
                await lock_lanes_and_jobs(tx, [key], [] if job_id is None else [job_id])
            still = await tx.rows("stuck_gates", limit=limit)
            if not any((row["id"], row["lane"]) == (job_id, key and key[1]) for row in still):
                return False
            if job_id is not None:
                await tx.rows("unresolve", id=job_id)
            if key is not None:
                await settle_lanes(tx, [key])
            return True

        return await self._database.transact(change)

    async def resolve_lanes(self, lanes: Sequence[LaneKey]) -> list[str]:
        """Resolve the unresolved jobs of these lanes; return the jobs that ended because of it."""
        await self._lanes.ensure(lanes)
        ended: list[str] = []
        for lane in lanes:
            while True:
                found, broken = await self._resolve_lane(lane)
                ended += broken
                if found is None:
                    await self._lanes.ensure([lane])
                elif not found:
                    break
        return ended

    async def _resolve_lanes(self) -> int:
        rows = await self._database.read("unresolved_lanes", limit=BATCH)
        await self.resolve_lanes([(row["tenant"], row["lane"]) for row in rows])
        return len(rows)

    async def _resolve_lane(self, lane: LaneKey) -> tuple[int | None, list[str]]:
        """Resolve some jobs of a lane; return how many (None if the lane was deleted) and the jobs that ended."""

        async def change(tx: Tx) -> tuple[int | None, list[str], set[str]]:
            lane_exists = await lock_lanes(tx, [lane])
            found = await tx.rows("unresolved_in_lane", tenant=lane[0], lane=lane[1], limit=BATCH)
            if not found:
                return 0, [], set()
            if not lane_exists:
                return None, [], set()
            ids = [row["id"] for row in found]
            needing = [row["id"] for row in found if row["has_needs"]]
            await tx.rows("lock_with_needs", ids=[*ids, *await lane_jobs(tx, [lane])])
            await tx.rows("set_lane_positions", ids=ids, tenant=lane[0], lane=lane[1])
            broken = await _update_needs(tx, needing) if needing else []
            await tx.rows("set_gates", ids=ids)
            return len(ids), broken, await settle_lanes(tx, [lane])

        count, broken, queues = await self._database.transact(change)
        self._notifications.post(work_topic(queue) for queue in queues)
        return count, broken

    async def _resolve_laneless(self) -> int:
        found = await self._database.read("unresolved_jobs", limit=BATCH)
        await self._resolve_jobs([row["id"] for row in found])
        return len(found)

    async def _resolve_jobs(self, ids: Sequence[str]) -> list[str]:
        """Resolve jobs without a lane; return the jobs that ended because of it."""
        batches = [list(ids[start : start + BATCH]) for start in range(0, len(ids), BATCH)]
        return [job_id for batch in batches for job_id in await self._resolve_batch(batch)]

    async def _resolve_batch(self, ids: list[str]) -> list[str]:
        async def change(tx: Tx) -> tuple[list[str], set[str]]:
            locked = await tx.rows("lock_with_needs", ids=ids)
            # Others may have resolved some meanwhile. Updating the needs of a job that already waits would hide it when
            # its dependency ends.
            mine = [row["id"] for row in locked if row["gate"] == "unresolved" and row["id"] in ids]
            if not mine:
                return [], set()
            broken = await _update_needs(tx, mine)
            opened = await tx.rows("set_gates", ids=mine)
            return broken, {row["queue"] for row in opened if row["gate"] == "open"}

        broken, queues = await self._database.transact(change)
        self._notifications.post(work_topic(queue) for queue in queues)
        return broken

    async def _settle_all(self) -> int:
        settled = 0
        for row in await self._database.read("unsettled_jobs", limit=BATCH):
            try:
                await self._settle(row["id"])
                settled += 1
            except LockTimeout as error:
                log.log(level_of(error), "dependants of job %s not settled; a duty will retry: %s", row["id"], error)
        return settled

    async def _unsettled(self, ids: Sequence[str]) -> list[str]:
        return [row["id"] for row in await self._database.read("unsettled_among", ids=list(ids))] if ids else []

    async def _settle(self, job_id: str) -> Sequence[Row]:
        """Apply a job's new status to all its dependants, a page at a time; return them."""
        shown: list[Row] = []
        after: str | None = None
        first_seq: int | None = None
        while True:

            async def change(
                tx: Tx, after: str | None = after, expected: int | None = first_seq
            ) -> tuple[int, Sequence[Row]]:
                # Read `seq` before the list: if the job changes meanwhile, it stays unsettled and is settled again.
                before = await tx.rows("job_seq", id=job_id)
                seq = before[0]["seq"] if before else 0
                page = await tx.rows("open_dependants", id=job_id, after_id=after, limit=BATCH)
                ids = [row["id"] for row in page]
                if ids:
                    await lock_keys(tx, ids, seconds=KEY_SECONDS)
                await tx.rows("lock_jobs", ids=[job_id, *ids])
                if ids:
                    await tx.rows("unsettle_dependants", id=job_id, ids=ids)
                    await tx.rows("revive_dependants", id=job_id, ids=await _without_replaced(tx, ids))
                if len(ids) < BATCH:
                    await tx.rows("settled", id=job_id, seq=seq if expected is None else expected)
                return seq, page

            seq, page = await self._database.transact(change)
            first_seq = seq if first_seq is None else first_seq
            shown += page
            if len(page) < BATCH:
                return shown
            after = page[-1]["id"]


async def take_reuse_key(tx: Tx, row: Row) -> str | None:
    """Give a locked reuse key back to a job; return the other job that is live for the key, if there is one."""
    key = {"tenant": row["tenant"], "reuse_key": row["reuse_key"]}
    if await tx.rows("take_reuse_key", id=row["id"], **key):
        return None
    (other,) = await tx.rows("job_with_reuse_key", **key)
    return str(other["job_id"])


async def _without_replaced(tx: Tx, ids: list[str]) -> list[str]:
    """Leave out jobs whose reuse key belongs to another live job: they stay failed, and an event reports it."""
    replaced = set()
    given: dict[tuple[str, str], str] = {}
    for row in await tx.rows("revivable_keys", ids=ids):
        key = (row["tenant"], row["reuse_key"])
        other = given.get(key) or await take_reuse_key(tx, row)
        given.setdefault(key, row["id"])
        if other is not None:
            replaced.add(row["id"])
            await tx.rows("add_events", id=row["id"], events=[event("audit", action="stays_failed", live=other)])
    return [job_id for job_id in ids if job_id not in replaced]


async def _update_needs(tx: Tx, ids: list[str]) -> list[str]:
    """Mark needs that succeeded, mark jobs that have waiting dependants, fail jobs whose dependency cannot succeed.

    Return the jobs that failed.
    """
    await tx.rows("satisfy_needs", ids=ids)
    await tx.rows("set_has_dependants", ids=ids)
    broken = await tx.rows("broken_needs", ids=ids)
    if broken:
        rows = [
            {
                "id": row["id"],
                "need_id": row["need_id"],
                "message": dependency_message(row["need_id"], row["need_status"], row["need_error"]),
            }
            for row in broken
        ]
        await tx.rows("fail_dependants", rows=rows)
    return [row["id"] for row in broken]
