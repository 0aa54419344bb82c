"""The tree of errors.

    HoldfastError
    ├── BadRequest                          400
    ├── Unauthorized                        401
    ├── Forbidden                           403
    │   └── FieldForbidden
    ├── RequestTimeout                      408
    ├── Invalid                             422
    │   └── TooLarge                        413
    ├── RangeNotSatisfiable                 416
    ├── NotFound                            404
    ├── Conflict                            409
    │   ├── IllegalMove
    │   ├── JobNotEnded
    │   ├── SnapshotInUse
    │   ├── NeedFailed
    │   ├── ReplayedJobDeleted
    │   ├── QueueOff
    │   └── QueuePaused
    ├── QueueFull                           429
    ├── RateLimited                         429
    ├── TooManyStreams                      429
    ├── AtCapacity                          503
    ├── CacheFull                           503
    ├── SnapshotDamaged                     503
    ├── SnapshotFailed                      503
    ├── NotReady                            503
    ├── DiskFull                            507
    ├── StorageUnavailable                  503
    │   └── SharedFolderUnavailable
    ├── NoResult
    │   ├── JobFailed
    │   ├── JobTimedOut
    │   ├── JobCancelled
    │   └── JobPaused
    ├── ConfigError
    └── StoreError                          503
        ├── StoreUnreachable
        │   └── StoreFull                   507
        ├── LockTimeout
        └── SchemaMismatch

How a job ends is data (`model.Outcome`); only a caller that asks for the result of a job without one gets an error.
"""

import re
from collections.abc import Sequence

_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -~]?)")
"""Escape sequences that a terminal interprets: colours, cursor movements, titles."""


def one_line(text: str, most: int) -> str:
    """Make foreign text safe for an error message: one line, no control characters, bounded."""
    plain = _TERMINAL.sub("", text[: 8 * most])
    line = " ".join("".join(one if one.isprintable() else " " for one in plain).split())
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"


class HoldfastError(Exception):
    """Base of all errors that holdfast raises on purpose."""

    status = 500
    code = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(HoldfastError):
    """Not JSON, or not declared as JSON."""

    status = 400
    code = "bad_request"


class Unauthorized(HoldfastError):
    """No token, or an unknown one."""

    status = 401
    code = "unauthorized"


class Forbidden(HoldfastError):
    """The token may not do this."""

    status = 403
    code = "forbidden"


class FieldForbidden(Forbidden):
    """Allowed, but not with this field."""

    code = "field_forbidden"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class RequestTimeout(HoldfastError):
    """The body arrived too slowly."""

    status = 408
    code = "request_timeout"


class Invalid(HoldfastError):
    """A value that cannot be accepted; names the field."""

    status = 422
    code = "invalid"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class TooLarge(Invalid):
    """A value that is too large."""

    status = 413
    code = "too_large"


class RangeNotSatisfiable(HoldfastError):
    """A range of bytes that an artifact does not have."""

    status = 416
    code = "range_not_satisfiable"


class NotFound(HoldfastError):
    """No such job, lane, worker… in this tenant."""

    status = 404
    code = "not_found"

    def __init__(self, what: str, key: str) -> None:
        super().__init__(f"no {what} {key}")
        self.what = what
        self.key = key


class Conflict(HoldfastError):
    """The thing exists, but not in a state that allows this."""

    status = 409
    code = "conflict"


class IllegalMove(Conflict):
    """A move that the table of moves does not have."""

    code = "illegal_move"

    def __init__(self, verb: str, job_id: str, status: str, allowed: Sequence[str]) -> None:
        possible = ", ".join(allowed)
        super().__init__(f"cannot {verb} job {job_id}: it is {status}, and {verb} needs one of: {possible}")
        self.verb = verb
        self.job_id = job_id
        self.from_status = status


class JobNotEnded(Conflict):
    """A job that has not ended is not deleted without force."""

    code = "blocked"

    def __init__(self, job_id: str, status: str) -> None:
        super().__init__(f"blocked: job {job_id} is {status}; cancel it first, or delete it with force")
        self.job_id = job_id
        self.job_status = status


class SnapshotInUse(Conflict):
    """A snapshot in use is not removed without force or recurse."""

    code = "needed"

    def __init__(self, snapshot: str, why: str) -> None:
        super().__init__(f"blocked: snapshot {snapshot} {why}")
        self.snapshot = snapshot


class NeedFailed(Conflict):
    """A dependency already failed or was cancelled."""

    code = "need_failed"

    def __init__(self, need_id: str, need_status: str) -> None:
        super().__init__(f"needs: job {need_id} {need_status}; resume or resolve it first, or leave it out")
        self.need_id = need_id
        self.need_status = need_status


class ReplayedJobDeleted(Conflict):
    """A job that this idempotency key made was deleted."""

    code = "gone"


class QueueOff(Conflict):
    """A request that needs a queue, on a server that runs jobs in the request."""

    code = "queue_off"


class QueuePaused(Conflict):
    """A job for a paused queue, on a server that runs jobs in the request."""

    code = "paused"


class QueueFull(HoldfastError):
    """A queue has reached its limit of waiting jobs."""

    status = 429
    code = "queue_full"


class RateLimited(HoldfastError):
    """Too many requests with one token, or with unknown ones."""

    status = 429
    code = "rate_limited"

    def __init__(self, wait: float, why: str = "too many requests with this token") -> None:
        super().__init__(f"{why}; try again in {wait:.1f} seconds")
        self.wait = wait


class TooManyStreams(HoldfastError):
    """A token has reached its limit of open streams."""

    status = 429
    code = "too_many_streams"


class AtCapacity(HoldfastError):
    """A server without a queue runs its maximum number of jobs."""

    status = 503
    code = "at_capacity"


class CacheFull(HoldfastError):
    """No space for a snapshot, and none that can be evicted."""

    status = 503
    code = "cache_full"


class SnapshotDamaged(HoldfastError):
    """A snapshot's folder differs from what was published."""

    status = 503
    code = "snapshot_damaged"


class SnapshotFailed(HoldfastError):
    """A snapshot's folder cannot be read or made here."""

    status = 503
    code = "snapshot_failed"


class NotReady(HoldfastError):
    """The database accepts no writes, or its disk is full."""

    status = 503
    code = "not_ready"


class DiskFull(HoldfastError):
    """A disk has less space left than HOLDFAST_DISK_RESERVE."""

    status = 507
    code = "disk_full"


class StorageUnavailable(HoldfastError):
    """The storage of artifacts and uploads does not answer."""

    status = 503
    code = "storage_unavailable"


class SharedFolderUnavailable(StorageUnavailable):
    """The shared folder is not mounted, or was replaced."""

    code = "shared_folder_away"


class NoResult(HoldfastError):
    """`Job.result`: the job has none. `job_status` is how it ended, `error_code` and `reason` say why."""

    code = "no_result"

    def __init__(self, job_id: str, job_status: str, error_code: str | None, reason: str) -> None:
        super().__init__(f"job {job_id} has no result: it is {job_status} ({error_code or 'no code'}): {reason}")
        self.job_id = job_id
        self.job_status = job_status
        self.error_code = error_code
        self.reason = reason


class JobFailed(NoResult):
    """`Job.result`: the job failed."""

    code = "job_failed"


class JobTimedOut(NoResult):
    """`Job.result`: the job took too long."""

    code = "job_timed_out"


class JobCancelled(NoResult):
    """`Job.result`: the job was cancelled."""

    code = "job_cancelled"


class JobPaused(NoResult):
    """`Job.result`: the job is paused and needs a person."""

    code = "job_paused"


class ConfigError(HoldfastError):
    """Settings that cannot work; lists every problem at once."""

    code = "config"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("settings that cannot work:\n" + "\n".join(f"  - {problem}" for problem in problems))
        self.problems = tuple(problems)


class StoreError(HoldfastError):
    """The database, not the request."""

    status = 503
    code = "store"


class StoreUnreachable(StoreError):
    """The database cannot be reached."""

    code = "store_unreachable"
    reported = False
    """Whether the outage is already in the log: further errors need not report it."""


class StoreFull(StoreUnreachable):
    """The disk of the SQLite file is full."""

    status = 507
    code = "store_full"


class LockTimeout(StoreError):
    """Another open transaction held a lock for too long."""

    code = "lock_timeout"


class SchemaMismatch(StoreError):
    """Not migrated, or migrated by a newer holdfast."""

    code = "schema_mismatch"
