"""Outcomes on their way into the database: sizes checked, texts made safe."""

import msgspec

from holdfast.errors import Invalid, TooLarge
from holdfast.model import Json, Outcome
from holdfast.store.moves import clean
from holdfast.submission import MAX_PAYLOAD


def encoded_result(result: Json) -> str | None:
    """Write a result as JSON text, or say why it cannot be."""
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
    """What `finish` answers for one job; its fields are that answer's columns, in order."""

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
