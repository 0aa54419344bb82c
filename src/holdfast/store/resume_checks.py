"""Why a job cannot be resumed: its attempt may still run, or a dependency cannot succeed."""

from typing import NoReturn

from holdfast.errors import Conflict, NeedFailed
from holdfast.model import BROKEN, Status
from holdfast.store.database import Row, Tx


async def refuse_open_attempt(tx: Tx, row: Row) -> NoReturn:
    """Refuse a resume: name the worker that will adopt the open attempt, or what a person must check first."""
    what = _may_still_run(row["id"], row["attempt"], row["domain"])
    reaching = await tx.rows("workers_in_domain", domain=row["domain"]) if row["error_code"] == "lost" else ()
    if reaching:
        raise Conflict(
            f"{what}, and worker {reaching[0]['worker']} is there and will adopt it; "
            "wait for it, or stop the attempt and resume with stopped=true"
        )
    raise Conflict(f"{what}; make sure that it does not, then resume with stopped=true")


async def refuse_unstopped_attempt(tx: Tx, row: Row) -> None:
    """Refuse to resume a job that was cancelled while its host was unreachable: its attempt may still run."""
    for attempt in await tx.rows("unstopped_attempt", id=row["id"]):
        what = _may_still_run(row["id"], attempt["attempt"], attempt["domain"])
        raise Conflict(f"{what}; make sure that it does not, then resume with stopped=true")


async def refuse_broken_needs(tx: Tx, row: Row) -> None:
    if not row["has_needs"]:
        return
    needs = [need["need_id"] for need in await tx.rows("open_needs", id=row["id"])]
    if not needs:
        return
    states = await tx.rows("need_states", tenant=row["tenant"], ids=needs)
    existing = {state["id"]: Status(state["status"]) for state in states}
    for need in needs:
        if need not in existing:
            raise Conflict(f"cannot resume job {row['id']}: it needs job {need}, which was deleted; submit a new job")
        if existing[need] in BROKEN:
            raise NeedFailed(need, existing[need])


def _may_still_run(job_id: str, attempt: int, domain: str) -> str:
    return f"cannot resume job {job_id}: its attempt {attempt} may still run in {domain}"
