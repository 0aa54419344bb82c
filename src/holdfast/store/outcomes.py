"""Outcomes on their way into the database: sizes checked, texts made safe."""

from typing import Any

import msgspec

from holdfast.errors import Invalid, TooLarge
from holdfast.model import Json, Lease, Outcome
from holdfast.store.moves import clean
from holdfast.submission import MAX_PAYLOAD


def encoded_result(result: Json) -> str | None:
    """Write a result as JSON text, or say why it cannot be."""
    if result is None:
        return None
    try:
        text = msgspec.json.encode(result)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise Invalid("result", f"cannot be written as JSON ({error})") from None
    if len(text) > MAX_PAYLOAD:
        raise TooLarge("result", f"{len(text)} bytes; at most {MAX_PAYLOAD} are accepted")
    return text.decode()


def ending(lease: Lease, outcome: Outcome) -> dict[str, Any]:
    """The row that the statement `finish` takes for one attempt."""
    row: dict[str, Any] = {
        "id": lease.id,
        "token": lease.token,
        "status": outcome.status.value,
        "cause": outcome.cause.value,
    }
    if outcome.result is not None:
        row["result"] = encoded_result(outcome.result)
    if outcome.error is not None:
        row["error_code"] = clean(outcome.error.code)
        row["error_message"] = clean(outcome.error.message)
    if outcome.exit_code is not None:
        row["exit_code"] = outcome.exit_code
    if outcome.signal is not None:
        row["signal"] = outcome.signal
    if outcome.delay:
        row["delay"] = outcome.delay
    return row
