"""Converts rows to values of the model, in the same way for every dialect."""

import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from holdfast import decoding
from holdfast.errors import NotFound
from holdfast.function_defaults import FunctionDefaults
from holdfast.model import (
    Attempt,
    Check,
    Error,
    Event,
    Job,
    Json,
    Lane,
    LaneState,
    LeaseView,
    Policy,
    Status,
    StopKind,
    StopPhase,
    StopRequest,
    WorkerRecord,
)
from holdfast.store.database import Row

T = TypeVar("T")

_decode = msgspec.json.decode
_policy = decoding.decoder(Policy).decode
_DEFAULT_POLICY = Policy()
STATUSES = {status.value: status for status in Status}


def known_id(job_id: str) -> str:
    """Return the canonical form of an id; text that is no id raises NotFound."""
    try:
        return str(uuid.UUID(job_id))
    except ValueError:
        raise NotFound("job", job_id[:60]) from None


def to_json(text: str | None, default: Json = None) -> Json:
    return default if text is None else _decode(text)


def to_stop(row: Row) -> StopRequest | None:
    if row["stop_kind"] is None:
        return None
    return StopRequest(
        kind=StopKind(row["stop_kind"]),
        phase=StopPhase(row["stop_phase"] or StopPhase.REQUESTED),
        deadline_at=row["stop_deadline_at"],
    )


def to_error(row: Row) -> Error | None:
    if row["error_code"] is None:
        return None
    return Error(code=row["error_code"], message=row["error_message"] or "")


def to_policy(text: str | None) -> Policy:
    return _DEFAULT_POLICY if text is None else _policy(text)


def from_row(kind: type[T], row: Row, **made: Any) -> T:
    """Return a struct whose fields are the columns of the same names, except those that are `made` of others.

    A field with a default may be missing from the row.
    """
    for name, convert, optional in _fields(cast(Hashable, kind)):
        if name not in made and (not optional or name in row):
            made[name] = row[name] if convert is None else convert(row[name])
    return kind(**made)


@cache
def _fields(kind: Any) -> tuple[tuple[str, Callable[[Any], Any] | None, bool], ...]:
    """Return each field with what converts its column, and whether it has a default."""
    fields = msgspec.structs.fields(kind)
    return tuple((field.name, _converter(inspect.type_info(field.type)), not field.required) for field in fields)


def _converter(declared: inspect.Type) -> Callable[[Any], Any] | None:
    """Return what makes a value of this type from a column, which is plain or JSON text; None if nothing has to."""
    match declared:
        case inspect.UnionType():
            (declared,) = (one for one in declared.types if not isinstance(one, inspect.NoneType))
            convert = _converter(declared)
            return convert and (lambda value: None if value is None else convert(value))
        case inspect.EnumType() as enum:
            return enum.cls
        case inspect.BoolType():
            return bool
        case inspect.AnyType():
            return to_json
        case inspect.DictType():
            return lambda text: to_json(text, {})
        case inspect.VarTupleType():
            return lambda text: tuple(to_json(text, ()))
        case inspect.StructType(cls=cls) if cls is Policy:
            return to_policy
    return None


def to_job(row: Row) -> Job:
    lease = None
    if row["owner"] is not None:
        lease = LeaseView(owner=row["owner"], token=row["token"], expires_at=row["lease_expires_at"])
    return from_row(Job, row, lease=lease, stop_request=to_stop(row), error=to_error(row), last_seq=row["seq"])


def to_event(row: Row) -> Event:
    return from_row(Event, row, at=row["event_at"])


def to_attempt(row: Row) -> Attempt:
    return from_row(Attempt, row, error=to_error(row))


def to_check(text: str | None) -> Check | None:
    return None if text is None else decoding.decode(text, Check)


def to_lane(row: Row) -> Lane:
    blockers = tuple(to_json(row["blockers"], ()))
    state = LaneState.IDLE
    if row["paused"]:
        state = LaneState.PAUSED
    elif blockers:
        state = LaneState.BLOCKED
    elif row["holder"] is not None:
        state = LaneState.ACTIVE
    head = row["holder"] or (blockers[0] if blockers else row["next_id"])
    return Lane(
        lane=row["lane"],
        state=state,
        head=head,
        blockers=blockers,
        check=to_check(row["readiness"]),
        depth=row["waiting"] + (1 if row["holder"] is not None and row["holder_gate"] != "lane" else 0),
    )


def to_worker(row: Row) -> WorkerRecord:
    return from_row(WorkerRecord, row)


def to_functions(rows: Sequence[Row]) -> Mapping[str, FunctionDefaults]:
    """Return the registered defaults by function."""
    return {row["function"]: FunctionDefaults(to_json(row["defaults"], {}), row["revision"]) for row in rows}
