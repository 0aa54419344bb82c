"""What each statement that changes a job must write, said in Python: the states of a job, and for each the new values.

A second opinion on `store/sql/transitions.sql`, without SQL. `before` is the whole row; a column that a function does
not name keeps its value; None means that the statement must not touch the job.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from holdfast.model import TERMINAL, Cause, Phase, Status, StopKind, uses_up_attempt

Row = Mapping[str, Any]
Written = dict[str, Any] | None
WORKER, ADOPTER = "w1", "w2"
TTL, GRACE, DELAY = 60.0, 7.0, 30.0
BASE, CAP = 5.0, 300.0
REASON = "enough"


def states(now: datetime) -> Iterator[dict[str, Any]]:
    """Every kind of job that the constraints of the table allow: status, owner, phase, stop request, dependants."""
    past, soon = now - timedelta(seconds=90), now + timedelta(seconds=5)
    attempt = {
        "attempt": 1, "worker": "w0", "domain": "host-a", "claimed_at": past, "claim_seq": 2, "started_at": past,
        "last_beat_at": past,
    }  # fmt: skip
    owned = {**attempt, "status": "running", "owner": WORKER, "lease_expires_at": now - timedelta(seconds=1)}
    orphaned = {**attempt, "status": "running", "orphaned_at": past, "adopt_after_at": past}
    kinds: list[dict[str, Any]] = [
        {"status": "pending", "gate": "held", "held": True},
        {"status": "queued", "gate": "open"},
        {"status": "queued", "gate": "future", "queue_deadline_at": past},
        {**owned, "phase": "claimed"},
        {**owned, "phase": "started", "attempt_started_at": past, "adoptions": 3, "adopter": ADOPTER},
        {**owned, "phase": "started", "attempt_started_at": past, "updated_at": soon},
        {**orphaned, "phase": "claimed"},
        {**orphaned, "phase": "started", "attempt_started_at": past, "adoptions": 40},
        {**attempt, "status": "paused"},
        {**attempt, "status": "paused", "phase": "started", "error_code": "lost", "error_message": "gone"},
        {"status": "failed", "finished_at": past, "error_code": "dependency_failed", "dismissed": True},
        {"status": "failed", "finished_at": past, "error_code": "dependency_failed", "held": True},
        *(
            {**attempt, "status": str(status), "finished_at": past, "result": "[1]"}
            for status in Status
            if status.terminal
        ),
    ]
    common = {"token": 5, "seq": 9, "spent": 1, "max_attempts": 3}
    for kind in kinds:
        for has_dependants in (False, True):
            yield {**common, **kind, "has_dependants": has_dependants}
            for stop in StopKind:
                asked = {"stop_kind": str(stop), "stop_reason": REASON, "stop_phase": "requested"}
                yield {**common, **kind, "has_dependants": has_dependants, **asked}


def changed(before: Row, now: datetime) -> datetime:
    """The time of a change: the clock's, but never before the last change."""
    last: datetime = before["updated_at"]
    return max(now, last)


def moved(before: Row, now: datetime, **written: Any) -> dict[str, Any]:
    return {"updated_at": changed(before, now), "seq": before["seq"] + 1, **written}


def claim(before: Row, now: datetime, domain: str = "function") -> Written:
    if before["gate"] != "open":
        return None
    at = changed(before, now)
    starts = domain == "function"
    return moved(
        before, now, status="running", gate=None, owner=WORKER, token=before["token"] + 1,
        lease_expires_at=now + timedelta(seconds=TTL), last_beat_at=now, queue_deadline_at=None, adoptions=0,
        attempt=before["attempt"] + 1, phase="started" if starts else "claimed", worker=WORKER, adopter=None,
        domain=domain, claimed_at=at, claim_seq=before["seq"] + 1, attempt_started_at=at if starts else None,
        stdout_offset=0, stderr_offset=0, batch=0, started_at=before["started_at"] or at,
    )  # fmt: skip


def adopt(before: Row, now: datetime) -> Written:
    if before["status"] != "running" or before["owner"] is not None:
        return None
    return moved(
        before, now, owner=ADOPTER, token=before["token"] + 1, lease_expires_at=now + timedelta(seconds=TTL),
        last_beat_at=now, orphaned_at=None, adopt_after_at=None, adoptions=before["adoptions"] + 1, adopter=ADOPTER,
    )  # fmt: skip


def is_owned(before: Row) -> bool:
    return before["status"] == "running" and before["owner"] is not None


def released(before: Row, now: datetime, wait: float, **written: Any) -> dict[str, Any]:
    return moved(
        before, now, owner=None, token=before["token"] + 1, lease_expires_at=None, orphaned_at=changed(before, now),
        adopt_after_at=now + timedelta(seconds=wait), **written,
    )  # fmt: skip


def hand_over(before: Row, now: datetime) -> Written:
    return released(before, now, DELAY, adoptions=0) if is_owned(before) else None


def hand_over_failed(before: Row, now: datetime) -> Written:
    return released(before, now, DELAY) if is_owned(before) else None


def reap(before: Row, now: datetime) -> Written:
    if not is_owned(before):
        return None
    adoptions = before["adoptions"]
    return released(before, now, min(CAP, BASE * 2 ** (min(adoptions, 30) - 1)) if adoptions else 0.0)


def start(before: Row, now: datetime) -> Written:
    if before["status"] != "running":
        return None
    at = changed(before, now)
    begun = before["attempt_started_at"] or at
    return {"phase": "started", "attempt_started_at": begun, "adoptions": 0, "updated_at": at}


def beat(before: Row, now: datetime) -> Written:
    if not is_owned(before):
        return None
    return {"lease_expires_at": now + timedelta(seconds=TTL), "last_beat_at": now}


def request_stop(before: Row, now: datetime) -> Written:
    if before["phase"] is None:
        return None
    return moved(before, now, stop_kind="delete", stop_reason="other", stop_phase="requested")


def advance_stop(before: Row, now: datetime) -> Written:
    if before["status"] != "running" or before["stop_kind"] is None:
        return None
    return moved(before, now, stop_phase="signalled", stop_deadline_at=now + timedelta(seconds=GRACE))


def request_deletion(before: Row, now: datetime) -> Written:
    if before["status"] not in TERMINAL:
        return None
    broken = before["status"] in ("failed", "timed_out")
    return {"stop_kind": "delete", "stop_phase": "requested", "dismissed": before["dismissed"] or broken}


def fail(before: Row, now: datetime) -> Written:
    if before["status"] not in ("pending", "queued"):
        return None
    return moved(
        before, now, status="failed", gate=None, finished_at=changed(before, now), queue_deadline_at=None,
        unsettled=before["has_dependants"], error_code="dependency_failed", error_message="needs another",
    )  # fmt: skip


def revive(before: Row, now: datetime) -> Written:
    if (before["status"], before["error_code"], before["stop_kind"]) != ("failed", "dependency_failed", None):
        return None
    return moved(
        before, now, status="pending" if before["held"] else "queued", gate="unresolved", dismissed=False,
        finished_at=None, queue_deadline_at=None, error_code=None, error_message=None,
        unsettled=before["has_dependants"],
    )  # fmt: skip


def move(before: Row, now: datetime, source: str, target: str, gate: str | None) -> Written:
    """The one statement of all verbs without a lease, with the parameters of test_transitions."""
    if before["status"] != source or before["owner"] is not None:
        return None
    at = changed(before, now)
    over, running, queued = target in TERMINAL, target == "running", target == "queued"
    return moved(
        before, now, status=target, gate=gate, held=before["held"] and target in ("pending", "failed"),
        finished_at=(before["finished_at"] if source == target else at) if over else None,
        token=before["token"] + (source == "running"), orphaned_at=at if running else None,
        adopt_after_at=now if running else None, phase=None if queued else before["phase"],
        spent=before["spent"] + (queued and before["phase"] is not None), dismissed=False, max_attempts=4,
        queue_deadline_at=max(now, before["available_at"]) + timedelta(seconds=DELAY) if queued else None,
        unsettled=over and before["has_dependants"], adoptions=0 if queued else before["adoptions"],
        error_code="code", error_message="message", result=None,
        **({} if before["stop_kind"] and not queued else dict.fromkeys(STOP_COLUMNS)),
    )  # fmt: skip


STOP_COLUMNS = ("stop_kind", "stop_phase", "stop_deadline_at", "stop_reason")

ENDS: dict[tuple[str, str | None], tuple[str, str | None, str | None]] = {
    ("queued", None): ("queued", "code", "message"),
    ("queued", "interrupt"): ("paused", "interrupted", f"interrupted by request: {REASON}"),
    ("queued", "cancel"): ("cancelled", "cancelled", f"cancelled by request: {REASON}"),
    ("queued", "delete"): ("cancelled", "cancelled", f"cancelled by request: {REASON}"),
}
"""How a requeue ends, by the stop request; every other end is as the worker says."""


def finish(before: Row, now: datetime, asked: str, cause: str, code: str, delay: float) -> Written:
    if before["status"] != "running":
        return None
    reason = f": {REASON}" if before["stop_kind"] and code in ("cancelled", "interrupted") else ""
    status, error, message = ENDS.get((asked, before["stop_kind"]), (asked, code, f"message{reason}"))
    if (asked, before["stop_kind"]) == ("queued", None):
        error = code
    at = changed(before, now)
    over, again = status in TERMINAL, status == "queued"
    return moved(
        before, now, status=status, gate=("future" if delay else "open") if again else None,
        available_at=at + timedelta(seconds=delay) if again else before["available_at"],
        finished_at=at if over else None, owner=None, lease_expires_at=None, orphaned_at=None, phase=None,
        spent=before["spent"] + uses_up_attempt(Cause(cause), Phase(before["phase"])),
        unsettled=over and before["has_dependants"], exit_code=3, error_code=error, error_message=message, result="[2]",
    )  # fmt: skip


Expected = Callable[[Row, datetime], Written]
