"""Prepares outcomes for the database: checks sizes, cleans texts, enforces the job's budget."""

from collections.abc import Sequence

import msgspec

from holdfast.budgets import EXCEEDED, REFUSED_ENDS, over_budget
from holdfast.errors import Invalid, TooLarge
from holdfast.model import Json, Outcome, Status
from holdfast.store.database import Row, Tx
from holdfast.store.rows import to_json
from holdfast.store.transitions import clean
from holdfast.submission import MAX_PAYLOAD


def encoded_result(result: Json) -> str | None:
    """Write a result as JSON text, or raise an error that says why it cannot be."""
    if result is None:
        return None
    try:
        text = msgspec.json.encode(result)
    except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError) as error:
        raise Invalid("result", f"cannot be written as JSON ({error})") from None
    if len(text) > MAX_PAYLOAD:
        raise TooLarge("result", f"{len(text)} bytes; at most {MAX_PAYLOAD} are accepted")
    return text.decode()


class Ending(msgspec.Struct, frozen=True):
    """The row that the statement `finish` takes for one attempt; its fields are that table's columns, in order."""

    id: str
    token: int
    status: str
    cause: str
    exit_code: int | None
    signal: int | None
    error_code: str | None
    error_message: str | None
    result: str | None
    delay: float


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """What `finish` returns for one job; its fields are the columns, in order."""

    id: str
    status: str
    queue: str
    gate: str | None
    has_dependants: bool


def ending(job_id: str, token: int, outcome: Outcome) -> Ending:
    error = outcome.error
    return Ending(
        job_id,
        token,
        str(outcome.status),
        str(outcome.cause),
        outcome.exit_code,
        outcome.signal,
        None if error is None else clean(error.code),
        None if error is None else clean(error.message),
        encoded_result(outcome.result),
        outcome.delay,
    )


async def within_budgets(tx: Tx, ends: Sequence[Ending]) -> list[Ending]:
    """Turn ends of jobs that are over their budget into failures; the caller holds the jobs' locks.

    Only here the last usage is certain to be recorded: a worker appends it before it finishes, both with its token.
    """
    spending = {row["id"]: row for row in await tx.rows("usage_of_jobs", ids=[end.id for end in ends])}
    return [_within_budget(end, spending[end.id]) if end.id in spending else end for end in ends]


def _within_budget(end: Ending, row: Row) -> Ending:
    if end.status not in REFUSED_ENDS or end.error_code == EXCEEDED:
        return end
    if end.status == Status.QUEUED and row["stop_kind"] is not None:
        return end  # The statement `finish` makes it cancelled or paused.
    over = over_budget(to_json(row["usage"], {}), to_json(row["budget"]))
    if over is None:
        return end
    message = over if end.error_message is None else f"{over}; {end.error_message}"
    return msgspec.structs.replace(
        end, status=str(Status.FAILED), error_code=EXCEEDED, error_message=message, result=None, delay=0.0
    )
