"""From rows to values of the model. The same for every dialect."""

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import NotFound
from holdfast.model import (
    Attempt,
    Cause,
    Error,
    Event,
    Gate,
    Job,
    Json,
    Lane,
    LaneState,
    Lease,
    LeaseView,
    Phase,
    Policy,
    Status,
    StopKind,
    StopPhase,
    StopRequest,
    Worker,
)
from holdfast.store.database import Row

_decode = msgspec.json.decode
_policy = msgspec.json.Decoder(Policy).decode
_DEFAULT_POLICY = Policy()
_PHASES = {phase.value: phase for phase in Phase}
STATUSES = {status.value: status for status in Status}


def known_id(job_id: str) -> str:
    """The canonical form of an id; text that cannot be one names no job."""
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
    )


def to_claimed(row: Row) -> Lease:
    """The lease of a new attempt. The hot one: every claimed job passes here."""
    return Lease(
        id=row["id"],
        token=row["token"],
        attempt=row["attempt"],
        phase=_PHASES[row["phase"]],
        domain=row["domain"],
        tenant=row["tenant"],
        queue=row["queue"],
        capability=row["capability"],
        lane=row["lane"],
        kind=row["kind"],
        priority=row["priority"],
        requested_at=row["requested_at"],
        attempt_started_at=row["attempt_started_at"],
        spent=row["spent"],
        max_attempts=row["max_attempts"],
        runner=row["runner"],
        spec_json=row["spec"],
        inputs_json=row["inputs"],
        policy=_DEFAULT_POLICY if row["policy"] is None else _policy(row["policy"]),
        usage=_NO_USAGE if row["usage"] is None else _decode(row["usage"]),
    )


def to_adopted(row: Row) -> Lease:
    """The lease of an attempt that goes on: where its log, its stop ladder and its adoptions stand."""
    return msgspec.structs.replace(
        to_claimed(row),
        adoptions=row["adoptions"],
        stdout_offset=row["stdout_offset"],
        stderr_offset=row["stderr_offset"],
        batch=row["batch"],
        stop_request=to_stop(row),
    )


_NO_USAGE: Mapping[str, float] = {}


def to_event(row: Row) -> Event:
    return Event(seq=row["seq"], at=row["event_at"], type=row["type"], task=row["task"], data=_decode(row["data"]))


def to_attempt(row: Row) -> Attempt:
    return Attempt(
        attempt=row["attempt"],
        worker=row["worker"],
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
        depth=row["waiting"] + (1 if row["holder"] is not None and row["holder_gate"] != "lane" else 0),
    )


def to_worker(row: Row) -> Worker:
    def decoded(name: str) -> Any:
        return to_json(row[name], [])

    return Worker(
        worker=row["worker"],
        host=row["host"],
        pid=row["pid"],
        queues=decoded("queues"),
        capabilities=tuple(decoded("capabilities")),
        domains=tuple(decoded("domains")),
        registered_at=row["registered_at"],
        seen_at=row["seen_at"],
        live=bool(row["live"]),
        draining=bool(row["draining"]),
        jobs=tuple(decoded("jobs")),
    )
