"""One move of one job without a lease: the steps that all callers' verbs share.

In one transaction: lock the lane, lock the job, check the table of moves, write the move with its events, settle the
lane.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import IllegalMove, NotFound
from holdfast.model import MOVES, Error, Gate, Json, Status, StopKind, Verb, is_legal
from holdfast.store.audit import By, name_of
from holdfast.store.database import Database, Row, Tx, json_text
from holdfast.store.lanes import lock_lanes_and_jobs, settle_lanes

MAX_MESSAGE = 4000
LOST = "lost"


def clean(text: str) -> str:
    """Return the text without characters that a database cannot store."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()[:MAX_MESSAGE]


def event(type: str, /, **data: Json) -> dict[str, str]:
    """Return an event as the statements take it: its data as JSON text, which no database parses."""
    return {"type": type, "data": json_text({key: value for key, value in data.items() if value is not None})}


def audit(verb: Verb | str, by: By, reason: str | None) -> list[dict[str, str]]:
    """Return the audit event that says who did it and why, if either is known."""
    name = name_of(by)
    if name is None and reason is None:
        return []
    return [event("audit", action=str(verb), by=name and clean(name), reason=reason and clean(reason))]


@dataclass(frozen=True, kw_only=True)
class Move:
    """What the statement `move` writes."""

    status: Status
    events: Sequence[Mapping[str, str]]
    gate: Gate | None = None
    error: Error | None = None
    keep_error: bool = False
    result: Json = None
    stop_kind: StopKind | None = None
    close_attempt: bool = False
    dismissed: bool = False
    max_attempts: int | None = None
    queue_timeout: float | None = None
    unsettle: bool = False

    def parameters(self) -> dict[str, Any]:
        values = asdict(self)
        values.pop("error")
        values["error_code"] = self.error and self.error.code
        values["error_message"] = self.error and clean(self.error.message)
        values["result"] = None if self.result is None else json_text(self.result)
        values["events"] = list(self.events)
        return values


def is_lost(row: Row) -> bool:
    """Return whether a job is paused because the fate of its attempt is unknown: it may still run and be adopted."""
    return row["status"] == Status.PAUSED and row["error_code"] == LOST and row["phase"] is not None


@dataclass(frozen=True)
class Moved:
    """What a move did: the locked row before it, whether anything changed, and what to notify."""

    before: Row
    status: Status
    queues: frozenset[str] = frozenset()
    unsettled: bool = False
    unresolved: bool = False


DecideMove = Callable[[Tx, Row], Awaitable[Move | None]]


async def change_job(database: Database, verb: Verb, tenant: str, job_id: str, decide: DecideMove) -> Moved:
    """Apply the move that `decide` returns to one job, or refuse; if `decide` returns None, nothing changes."""

    async def change(tx: Tx) -> Moved:
        if verb is Verb.RESUME:
            await lock_keys(tx, [job_id])
        row = await lock_job(tx, tenant, job_id)
        if not is_legal(verb, Status(row["status"])):
            raise IllegalMove(verb, job_id, row["status"], [str(status) for status in MOVES[verb]])
        move = await decide(tx, row)
        if move is None:
            return Moved(row, Status(row["status"]))
        return await write_move(tx, verb, row, move)

    return await database.transact(change)


async def lock_keys(tx: Tx, ids: Sequence[str], *, seconds: int = 0) -> None:
    """Lock the reuse keys of jobs, in order, before anything else: an open submit may hold one for a long time.

    A duty gives up after some `seconds` and retries later; 0 waits without limit.
    """
    keys = await tx.rows("reuse_keys", ids=list(ids))
    if keys and seconds:
        await tx.rows("wait_for_locks", seconds=seconds)
    for row in keys:
        await tx.rows("lock_reuse_key", tenant=row["tenant"], reuse_key=row["reuse_key"], id=row["id"])
    if keys and seconds:
        await tx.rows("wait_for_locks", seconds=0)


async def lock_job(tx: Tx, tenant: str, job_id: str) -> Row:
    """Lock a job, its lane first, and return its current row."""
    found = await tx.rows("find_job", id=job_id, tenant=tenant)
    if found and found[0]["lane"] is not None:
        await lock_lanes_and_jobs(tx, [(tenant, found[0]["lane"])], [job_id])
    locked = await tx.rows("lock_job", id=job_id) if found else ()
    if not locked:
        raise NotFound("job", job_id)
    return locked[0]


async def write_move(tx: Tx, verb: Verb, row: Row, move: Move) -> Moved:
    source = Status(row["status"])
    if move.status not in MOVES[verb][source]:
        raise AssertionError(f"{verb} does not move {source} to {move.status}")
    moved = await tx.rows("move", id=row["id"], from_status=source, **move.parameters())
    if not moved:
        raise AssertionError(f"{verb} of job {row['id']} found it changed under its lock")
    queues = {moved[0]["queue"]} if moved[0]["gate"] == Gate.OPEN else set()
    # The lane of a job that becomes unresolved is settled by the resolver, with the job at its own position.
    if row["lane"] is not None and move.gate is not Gate.UNRESOLVED:
        queues |= await settle_lanes(tx, [(row["tenant"], row["lane"])])
    return Moved(
        row,
        move.status,
        frozenset(queues),
        unsettled=move.unsettle and bool(row["has_dependants"]),
        unresolved=move.gate == Gate.UNRESOLVED,
    )
