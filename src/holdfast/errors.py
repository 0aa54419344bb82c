"""The tree of errors.

    HoldfastError
    ├── BadRequest       not JSON, or not declared as JSON                             400
    ├── Unauthorized     no token, or an unknown one                                   401
    ├── Forbidden        the token may not do this                                     403
    │   └── FieldForbidden  allowed, but not with this field
    ├── RequestTimeout   the body arrived too slowly                                   408
    ├── Invalid          a value that cannot be accepted; names the field              422
    │   └── TooLarge     a value that is too large                                     413
    ├── RangeNotSatisfiable  a range of bytes that an artifact does not have           416
    ├── NotFound         no such job, lane, worker… in this tenant                     404
    ├── Conflict         the thing exists, but not in a state that allows this         409
    │   ├── IllegalMove  the table of moves has no such move from this status
    │   ├── JobNotEnded  a job that has not ended is not deleted without force
    │   ├── SnapshotInUse  a snapshot in use is not removed without force or recurse
    │   ├── NeedFailed   a dependency already failed or was cancelled
    │   ├── ReplayedJobDeleted  a job that this idempotency key made was deleted
    │   ├── QueueOff     a request that needs a queue, on a server that runs jobs in the request
    │   └── QueuePaused  a job for a paused queue, on such a server
    ├── QueueFull        a queue has reached its limit of waiting jobs                 429
    ├── RateLimited      too many requests with one token, or with unknown ones        429
    ├── TooManyStreams   a token has reached its limit of open streams                 429
    ├── AtCapacity       a server without a queue runs its maximum number of jobs      503
    ├── CacheFull        no space for a snapshot, and none that can be evicted         503
    ├── SnapshotDamaged  a snapshot's folder differs from what was published           503
    ├── SnapshotFailed   a snapshot's folder cannot be read or made here               503
    ├── NotReady         the database accepts no writes, or its disk is full           503
    ├── DiskFull         a disk has less space left than HOLDFAST_DISK_RESERVE         507
    ├── StorageUnavailable  the storage of artifacts and uploads does not answer       503
    │   └── SharedFolderUnavailable  the shared folder is not mounted, or was replaced
    ├── ConfigError      settings that cannot work; lists every problem at once
    └── StoreError       the database, not the request                                 503
        ├── StoreUnreachable
        │   └── StoreFull    the disk of the SQLite file is full                       507
        ├── LockTimeout      another open transaction held a lock for too long
        └── SchemaMismatch   not migrated, or migrated by a newer holdfast

"The job failed" is not in here: how a job ends is data (`model.Outcome`).
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
    status = 400
    code = "bad_request"


class Unauthorized(HoldfastError):
    status = 401
    code = "unauthorized"


class Forbidden(HoldfastError):
    status = 403
    code = "forbidden"


class FieldForbidden(Forbidden):
    code = "field_forbidden"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class RequestTimeout(HoldfastError):
    status = 408
    code = "request_timeout"


class Invalid(HoldfastError):
    status = 422
    code = "invalid"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class TooLarge(Invalid):
    status = 413
    code = "too_large"


class RangeNotSatisfiable(HoldfastError):
    status = 416
    code = "range_not_satisfiable"


class NotFound(HoldfastError):
    status = 404
    code = "not_found"

    def __init__(self, what: str, key: str) -> None:
        super().__init__(f"no {what} {key}")
        self.what = what
        self.key = key


class Conflict(HoldfastError):
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
    code = "blocked"

    def __init__(self, job_id: str, status: str) -> None:
        super().__init__(f"blocked: job {job_id} is {status}; cancel it first, or delete it with force")
        self.job_id = job_id
        self.job_status = status


class SnapshotInUse(Conflict):
    code = "needed"

    def __init__(self, snapshot: str, why: str) -> None:
        super().__init__(f"blocked: snapshot {snapshot} {why}")
        self.snapshot = snapshot


class NeedFailed(Conflict):
    code = "need_failed"

    def __init__(self, need_id: str, need_status: str) -> None:
        super().__init__(f"needs: job {need_id} {need_status}; resume or resolve it first, or leave it out")
        self.need_id = need_id
        self.need_status = need_status


class ReplayedJobDeleted(Conflict):
    code = "gone"


class QueueOff(Conflict):
    code = "queue_off"


class QueuePaused(Conflict):
    code = "paused"


class QueueFull(HoldfastError):
    status = 429
    code = "queue_full"


class RateLimited(HoldfastError):
    status = 429
    code = "rate_limited"

    def __init__(self, wait: float, why: str = "too many requests with this token") -> None:
        super().__init__(f"{why}; try again in {wait:.1f} seconds")
        self.wait = wait


class TooManyStreams(HoldfastError):
    status = 429
    code = "too_many_streams"


class AtCapacity(HoldfastError):
    status = 503
    code = "at_capacity"


class CacheFull(HoldfastError):
    status = 503
    code = "cache_full"


class SnapshotDamaged(HoldfastError):
    status = 503
    code = "snapshot_damaged"


class SnapshotFailed(HoldfastError):
    status = 503
    code = "snapshot_failed"


class NotReady(HoldfastError):
    status = 503
    code = "not_ready"


class DiskFull(HoldfastError):
    status = 507
    code = "disk_full"


class StorageUnavailable(HoldfastError):
    status = 503
    code = "storage_unavailable"


class SharedFolderUnavailable(StorageUnavailable):
    code = "shared_folder_away"


class ConfigError(HoldfastError):
    code = "config"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("settings that cannot work:\n" + "\n".join(f"  - {problem}" for problem in problems))
        self.problems = tuple(problems)


class StoreError(HoldfastError):
    status = 503
    code = "store"


class StoreUnreachable(StoreError):
    code = "store_unreachable"
    reported = False
    """Whether the outage is already in the log: further errors need not report it."""


class StoreFull(StoreUnreachable):
    status = 507
    code = "store_full"


class LockTimeout(StoreError):
    code = "lock_timeout"


class SchemaMismatch(StoreError):
    code = "schema_mismatch"
