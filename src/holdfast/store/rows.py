"""Converts rows to values of the model, in the same way for every dialect."""

import uuid
from typing import Any

import msgspec

from holdfast import decoding
from holdfast.errors import NotFound
from holdfast.model import (
    Attempt,
    Cause,
    Check,
    Error,
    Event,
    Gate,
    Job,
    Json,
    Lane,
    LaneState,
    LeaseView,
    Phase,
    Policy,
    Status,
    StopKind,
    StopPhase,
    StopRequest,
    WorkerRecord,
)
from holdfast.store.database import Row

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


def to_job(row: Row) -> Job:
    lease = None
    if row["owner"] is not None:
        lease = LeaseView(owner=row["owner"], token=row["token"], expires_at=row["lease_expires_at"])
    return Job(
        id=row["id"],
        tenant=row["tenant"],
        kind=row["kind"],
        queue=row["queue"],
        lane=row["lane"],
        status=Status(row["status"]),
        gate=None if row["gate"] is None else Gate(row["gate"]),
        priority=row["priority"],
        labels=to_json(row["labels"], {}),
        runner=row["runner"],
        spec=_decode(row["spec"]),
        inputs=_decode(row["inputs"]),
        attempts=row["attempts"],
        attempt=row["attempt"],
        max_attempts=row["max_attempts"],
        requested_at=row["requested_at"],
        available_at=row["available_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        updated_at=row["updated_at"],
        lease=lease,
        orphaned_at=row["orphaned_at"],
        dismissed=bool(row["dismissed"]),
        stop_request=to_stop(row),
        progress=to_json(row["progress"]),
        usage=to_json(row["usage"], {}),
        result=to_json(row["result"]),
        exit_code=row["exit_code"],
        error=to_error(row),
        last_seq=row["seq"],
        policy=to_policy(row["policy"]),
        reuse_key=row["reuse_key"],
    )


def to_event(row: Row) -> Event:
    return Event(seq=row["seq"], at=row["event_at"], type=row["type"], task=row["task"], data=_decode(row["data"]))


def to_attempt(row: Row) -> Attempt:
    return Attempt(
        attempt=row["attempt"],
        worker=row["worker"],
        last_worker=row["last_worker"],
        domain=row["domain"],
        token=row["token"],
        claimed_at=row["claimed_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        phase=None if row["phase"] is None else Phase(row["phase"]),
        cause=None if row["cause"] is None else Cause(row["cause"]),
        exit_code=row["exit_code"],
        signal=row["signal"],
        error=to_error(row),
    )


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
    def decoded(name: str) -> Any:
        return to_json(row[name], [])

    return WorkerRecord(
        worker=row["worker"],
        host=row["host"],
        pid=row["pid"],
        queues=decoded("queues"),
        capabilities=tuple(decoded("capabilities")),
        domains=tuple(decoded("domains")),
        away=to_json(row["away"], {}),
        registered_at=row["registered_at"],
        seen_at=row["seen_at"],
        live=bool(row["live"]),
        draining=bool(row["draining"]),
        jobs=tuple(decoded("jobs")),
        figures=to_json(row["figures"], {}),
    )
