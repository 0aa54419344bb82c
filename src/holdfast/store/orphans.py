"""Attempts whose worker is gone: handed over, adopted, settled as lost, or paused for a person to inspect.

An orphan is `running` without an owner. An orphan that no worker can reach, and that may still run, is `paused` with
code `lost`; its attempt stays open, so that a worker which reaches its domain again can recover it.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol, TypeVar

import msgspec

from holdfast.errors import Conflict, NotFound
from holdfast.model import FUNCTION_DOMAIN, STOPPED, Cause, Error, Outcome, Policy, Status, StopKind, Verb
from holdfast.retry import after_loss, without_backoff
from holdfast.store import notify
from holdfast.store.after_moves import AfterMoves
from holdfast.store.database import Database, Row, Tx
from holdfast.store.gates import Gates
from holdfast.store.lanes import keys, settle_lanes
from holdfast.store.outcomes import Ended, ending, within_budgets
from holdfast.store.rows import to_policy
from holdfast.store.transitions import LOST, Move, Moved, change_job, event, is_lost, lock_job, write_move

ADOPTIONS_WITHOUT_PROGRESS = 5
BACKOFF_BASE, BACKOFF_CAP = 5.0, 300.0
"""Seconds that an orphan waits for the next adoption after earlier ones brought no progress: first delay, maximum."""


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    """An open attempt without an owner, as read at `now_at`. Its token fences every later write about it."""

    id: str
    tenant: str
    token: int
    attempt: int
    domain: str
    spent: int
    max_attempts: int
    policy: Policy
    last_beat_at: datetime
    now_at: datetime
    stop_kind: StopKind | None = None


class _Named(Protocol):
    @property
    def id(self) -> str: ...


Held = TypeVar("Held", bound=_Named)


class Orphans:
    """The part of `Leases` that handles attempts without an owner."""

    def __init__(self, database: Database, gates: Gates, wake_up: notify.Notifications) -> None:
        self._database = database
        self._after_moves = AfterMoves(database, gates, wake_up)
        self._notifications = wake_up

    async def orphan(self, worker: str) -> frozenset[str]:
        """Hand over all leases of a worker that is known to be dead, and delete its row; return the jobs."""

        async def change(tx: Tx) -> Sequence[Row]:
            # Lock the worker's row before its jobs, in the same order as a heartbeat.
            await tx.rows("delete_worker", worker=worker)
            return await tx.rows("orphan", worker=worker, base=BACKOFF_BASE, cap=BACKOFF_CAP)

        return self._handed(await self._database.transact(change))

    async def clear(self, worker: str) -> frozenset[str]:
        """Hand over all leases of a dead worker, but keep its row and its domains."""
        return self._handed(await self._database.rows("orphan", worker=worker, base=BACKOFF_BASE, cap=BACKOFF_CAP))

    def _handed(self, rows: Sequence[Row]) -> frozenset[str]:
        if rows:
            self._notifications.post([notify.ORPHAN])
        return frozenset(row["id"] for row in rows)

    async def unreachable(self, grace: float, limit: int = 100, *, after: str | None = None) -> Sequence[Orphan]:
        """Return, by id, orphans that have waited longer than `grace` in a domain without a live worker for as long.

        Functions are not included: `orphaned_functions` are settled as soon as they are due.
        """
        rows = await self._database.read(
            "unreachable_orphans", grace=grace, function=FUNCTION_DOMAIN, after_id=after, limit=limit
        )
        return [_orphan(row) for row in rows]

    async def orphaned_functions(self, limit: int = 100) -> Sequence[Orphan]:
        """Return orphaned functions that are due: a function dies with its worker, so there is nothing to look for."""
        rows = await self._database.read("orphaned_functions", function=FUNCTION_DOMAIN, limit=limit)
        return [_orphan(row) for row in rows]

    async def open_in(self, domains: Sequence[str], *, after: str | None = None, limit: int = 100) -> Sequence[Orphan]:
        """Return a page of orphans and of jobs paused as lost in these domains, by id."""
        rows = await self._database.read("open_in_domains", domains=list(domains), after_id=after, limit=limit)
        return [_orphan(row) for row in rows]

    async def lose(
        self, orphan: Orphan, *, message: str | None = None, events: Sequence[Mapping[str, str]] = ()
    ) -> Status | None:
        """End an attempt as lost, according to the job's `on_lost`; return None if the job changed meanwhile.

        The caller must know that the attempt no longer runs.
        """
        error = message or f"the attempt was lost: it ran in {orphan.domain}, which no worker can reach"
        lost = after_loss(
            Outcome.failed(LOST, error, cause=Cause.LOST),
            orphan.policy,
            spent=orphan.spent,
            max_attempts=orphan.max_attempts,
        )
        ((_, outcome),) = await self._first_losses_at_once([(orphan, lost)])
        return await self._end_orphan(orphan, outcome, events)

    async def settle_function(self, orphan: Orphan) -> Status | None:
        """End an orphaned function as an adopting worker would; return None if the job changed meanwhile."""
        if orphan.stop_kind is None:
            return await self.lose(orphan, message="the attempt was lost with its worker")
        end = STOPPED[StopKind(orphan.stop_kind)]
        outcome = Outcome(status=end.status, cause=end.cause, error=Error(code=end.code, message=end.message))
        return await self._end_orphan(orphan, outcome)

    async def _first_losses_at_once(self, ends: Sequence[tuple[Held, Outcome]]) -> Sequence[tuple[Held, Outcome]]:
        """Remove the backoff from requeues of jobs that lose an attempt for the first time.

        The read needs no lock: only the owner of the open attempt, or the process that settles it, adds to its losses.
        """
        waiting = [held.id for held, end in ends if end.cause is Cause.LOST and end.delay]
        if not waiting:
            return ends
        before = {row["id"] for row in await self._database.read("lost_before", ids=waiting)}
        first = set(waiting) - before
        return [(held, without_backoff(end) if held.id in first else end) for held, end in ends]

    async def _end_orphan(
        self, orphan: Orphan, outcome: Outcome, events: Sequence[Mapping[str, str]] = ()
    ) -> Status | None:
        end = ending(orphan.id, orphan.token, outcome)

        async def change(tx: Tx) -> tuple[Sequence[Ended], set[str]]:
            row = await lock_job(tx, orphan.tenant, orphan.id)
            if not _stands(row, orphan):
                return [], set()
            if row["status"] == Status.PAUSED and await _take_back(tx, row) is None:
                return [], set()
            if events:
                await tx.rows("add_events", id=row["id"], events=list(events))
            ended = await tx.values("finish", Ended, rows=await within_budgets(tx, [end]))
            lane = row["lane"]
            return ended, await settle_lanes(tx, [(row["tenant"], lane)]) if lane is not None else set()

        try:
            ended, queues = await self._database.transact(change)
        except NotFound:
            return None
        await self._after_moves.ended(ended, lost=len(ended) if outcome.cause is Cause.LOST else 0, queues=queues)
        return Status(ended[0].status) if ended else None

    async def strand(self, orphan: Orphan) -> bool:
        """Pause an orphan whose loss cannot be verified; its attempt stays open for `recover` or for a person."""
        message = (
            f"attempt {orphan.attempt} may still run in {orphan.domain}, which no live worker reaches: "
            "start a worker there to continue it; or make sure that it has stopped, then resume the job with "
            f"stopped=true; or give up everything that ran there with `holdfast workers lost {orphan.domain}`"
        )
        return await self._pause(orphan.tenant, orphan.id, LOST, message, token=orphan.token)

    async def recover(self, domains: Sequence[str], limit: int = 100) -> frozenset[str]:
        """Turn jobs that were paused as lost in these domains back into orphans, adoptable at once; return them."""
        rows = await self._database.read("recoverable", domains=list(domains), limit=limit)
        recovered = {row["id"] for row in rows if await self._recover(row["tenant"], row["id"], domains)}
        if recovered:
            self._notifications.post([notify.ORPHAN])
        return frozenset(recovered)

    async def _recover(self, tenant: str, job_id: str, domains: Sequence[str]) -> bool:
        async def change(tx: Tx) -> bool:
            row = await lock_job(tx, tenant, job_id)
            return is_lost(row) and row["domain"] in domains and await _take_back(tx, row) is not None

        try:
            return await self._database.transact(change)
        except NotFound:
            return False

    async def abandon(self, limit: int = 100) -> int:
        """Pause orphans that were adopted repeatedly without progress, for a person to inspect; return how many."""
        failing = await self._database.read("failing_orphans", adoptions=ADOPTIONS_WITHOUT_PROGRESS, limit=limit)
        paused = 0
        for row in failing:
            message = f"adopted {row['adoptions']} times without progress"
            paused += await self._pause(row["tenant"], row["id"], "internal", message, token=row["token"])
        return paused

    async def _pause(self, tenant: str, job_id: str, code: str, message: str, *, token: int) -> bool:
        async def plan(_: Tx, row: Row) -> Move | None:
            if row["owner"] is not None or row["token"] != token:
                return None
            return Move(
                status=Status.PAUSED,
                error=Error(code=code, message=message),
                stop_kind=row["stop_kind"],
                events=[event("status", status="paused", code=code, message=message)],
            )

        try:
            moved = await change_job(self._database, Verb.ABANDON, tenant, job_id, plan)
        except (Conflict, NotFound):
            return False
        return moved.status is Status.PAUSED


async def _take_back(tx: Tx, row: Row) -> Moved | None:
    """Move a locked job that is paused as lost back to `running`, as an orphan that holds its lane; None if impossible.

    Its stop request, if any, stays on the job for the worker that adopts it.
    """
    if row["lane"] is not None:
        key = (row["tenant"], row["lane"])
        (lane,) = await tx.rows("lane_states", lanes=keys([key]))
        if lane["holder"] not in (None, row["id"]):
            return None
        await tx.rows("set_holders", rows=[{"tenant": key[0], "lane": key[1], "holder": row["id"]}])
    events = [event("status", status="running", attempt=row["attempt"], by=str(Verb.ADOPT))]
    return await write_move(tx, Verb.ADOPT, row, Move(status=Status.RUNNING, stop_kind=row["stop_kind"], events=events))


def _stands(row: Row, orphan: Orphan) -> bool:
    """Return whether an orphan is unchanged since it was read."""
    open_ = row["status"] == Status.RUNNING or is_lost(row)
    return open_ and row["owner"] is None and row["token"] == orphan.token


def _orphan(row: Row) -> Orphan:
    known = {field: row[field] for field in Orphan.__struct_fields__ if field in row}
    return Orphan(**{**known, "policy": to_policy(row["policy"])})
