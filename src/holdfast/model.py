"""Jobs, statuses, leases, events, outcomes: holdfast's concepts as frozen values, and the one table of legal moves.

No I/O here. The store returns these values, and workers and callers pass them to the store.
"""

import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, cast

import msgspec

from holdfast import decoding

Json = Any
RunnerName = Literal["function", "process", "docker"]
OnLost = Literal["requeue", "fail", "pause", "hold"]
"""What follows a lost attempt. `hold` is the old name of `pause`: it is accepted everywhere and read as `pause`."""


class Status(StrEnum):
    PENDING = "pending"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.TIMED_OUT, Status.CANCELLED})
WAITING = frozenset({Status.PENDING, Status.QUEUED})
BROKEN = frozenset({Status.FAILED, Status.TIMED_OUT, Status.CANCELLED})


class Gate(StrEnum):
    """Why a waiting job waits. `open` is claimable."""

    OPEN = "open"
    FUTURE = "future"
    NEEDS = "needs"
    LANE = "lane"
    HELD = "held"
    UNRESOLVED = "unresolved"


class Phase(StrEnum):
    CLAIMED = "claimed"
    STARTED = "started"


class Cause(StrEnum):
    """Why an attempt ended."""

    EXIT = "exit"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    IDLE_TIMEOUT = "idle_timeout"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    LOST = "lost"
    START_FAILED = "start_failed"
    DRAINED = "drained"


class StopKind(StrEnum):
    """What a stop request asks for; a later one only escalates, in this order."""

    INTERRUPT = "interrupt"
    CANCEL = "cancel"
    DELETE = "delete"

    def escalates(self, other: "StopKind | None") -> bool:
        order = list(StopKind)
        return other is None or order.index(self) > order.index(other)


class StopPhase(StrEnum):
    """How far the stop sequence has come."""

    REQUESTED = "requested"
    SIGNALLED = "signalled"
    KILLED = "killed"
    DEAD = "dead"
    NOT_DEAD = "not_dead"


class Verb(StrEnum):
    RELEASE = "release"
    CLAIM = "claim"
    ADOPT = "adopt"
    FINISH = "finish"
    REQUEUE = "requeue"
    CANCEL = "cancel"
    INTERRUPT = "interrupt"
    RESUME = "resume"
    RESOLVE = "resolve"
    DISMISS = "dismiss"
    EXPIRE = "expire"
    FAIL = "fail"
    REVIVE = "revive"
    ABANDON = "abandon"


def _moves() -> Mapping[Verb, Mapping[Status, frozenset[Status]]]:
    s = Status
    table: dict[Verb, dict[Status, set[Status]]] = {
        Verb.RELEASE: {s.PENDING: {s.QUEUED}},
        Verb.CLAIM: {s.QUEUED: {s.RUNNING}},
        # Adopting keeps a running job running; a paused one is adopted when its loss could not be verified.
        Verb.ADOPT: {s.RUNNING: {s.RUNNING}, s.PAUSED: {s.RUNNING}},
        Verb.FINISH: {s.RUNNING: {s.SUCCEEDED, s.FAILED, s.TIMED_OUT, s.CANCELLED, s.PAUSED}},
        # A pending stop request turns a requeue into the stop.
        Verb.REQUEUE: {s.RUNNING: {s.QUEUED, s.CANCELLED, s.PAUSED}},
        # Running stays running: the stop request is written and its owner carries it out.
        Verb.CANCEL: {
            s.PENDING: {s.CANCELLED},
            s.QUEUED: {s.CANCELLED},
            s.RUNNING: {s.RUNNING},
            s.PAUSED: {s.CANCELLED},
            s.CANCELLED: {s.CANCELLED},
        },
        Verb.INTERRUPT: {
            s.PENDING: {s.CANCELLED},
            s.QUEUED: {s.CANCELLED},
            s.RUNNING: {s.RUNNING},
            s.PAUSED: {s.PAUSED},
        },
        Verb.RESUME: {
            s.PAUSED: {s.QUEUED},
            s.FAILED: {s.QUEUED},
            s.TIMED_OUT: {s.QUEUED},
            s.CANCELLED: {s.QUEUED},
        },
        Verb.RESOLVE: {s.PAUSED: {s.SUCCEEDED}, s.FAILED: {s.SUCCEEDED}, s.TIMED_OUT: {s.SUCCEEDED}},
        Verb.DISMISS: {s.FAILED: {s.FAILED}, s.TIMED_OUT: {s.TIMED_OUT}},
        # Moves of the store itself: queue timeout, a failed dependency, its revival, an orphan that is given up.
        Verb.EXPIRE: {s.QUEUED: {s.TIMED_OUT}},
        Verb.FAIL: {s.PENDING: {s.FAILED}, s.QUEUED: {s.FAILED}},
        Verb.REVIVE: {s.FAILED: {s.QUEUED, s.PENDING}},
        Verb.ABANDON: {s.RUNNING: {s.PAUSED}},
    }
    return MappingProxyType(
        {
            verb: MappingProxyType({source: frozenset(targets) for source, targets in moves.items()})
            for verb, moves in table.items()
        }
    )


MOVES = _moves()


def legal(verb: Verb, source: Status) -> bool:
    """Return whether the table of moves has this verb for a job in this status."""
    return source in MOVES[verb]


class Error(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base: float = 5.0
    cap: float = 300.0
    on: tuple[Literal["failed", "timed_out"], ...] = ("failed",)


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A readiness check of a lane or a tool: a command, and the seconds it may take."""

    command: tuple[str, ...]
    timeout: float


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A job's rules: retries, losses, limits of time and budget, its secrets and uploads, its readiness check."""

    on_lost: OnLost = "requeue"
    retry: RetryPolicy = RetryPolicy()
    timeout: float | None = None
    queue_timeout: float | None = None
    idle_timeout: float | None = None
    stop_grace: float = 5.0
    stop_after: float | None = None
    budget: Mapping[str, float] | None = None
    secrets: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()
    check: Check | None = None

    def __post_init__(self) -> None:
        # The database has what the caller wrote, also from before `pause` existed; nothing else compares with `hold`.
        if self.on_lost == "hold":
            msgspec.structs.force_setattr(self, "on_lost", "pause")


class StopRequest(msgspec.Struct, frozen=True, kw_only=True):
    kind: StopKind
    phase: StopPhase
    deadline_at: datetime | None = None


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as people see it."""

    owner: str
    token: int
    expires_at: datetime


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as people see it."""

    id: str
    tenant: str
    kind: str
    queue: str
    lane: str | None
    status: Status
    gate: Gate | None
    priority: int
    labels: Mapping[str, str]
    runner: RunnerName
    spec: Json
    inputs: Json
    attempts: int
    attempt: int
    max_attempts: int
    requested_at: datetime
    available_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    updated_at: datetime
    lease: LeaseView | None
    orphaned_at: datetime | None
    dismissed: bool
    stop_request: StopRequest | None
    progress: Json
    usage: Mapping[str, float]
    result: Json
    exit_code: int | None
    error: Error | None
    last_seq: int
    policy: Policy
    reuse_key: str | None = None
    reused: bool = False

    @property
    def capability(self) -> str:
        """The capability that a worker needs for the job."""
        return f"function:{self.spec['name']}" if self.runner == "function" else self.runner


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an attempt that another worker began: its log, its stop sequence, how long it has run."""

    phase: Phase
    adoptions: int
    ran: float | None = None
    stdout_offset: int = 0
    stderr_offset: int = 0
    batch: int = 0
    stop_request: StopRequest | None = None


def attempts_left(spent: int, max_attempts: int) -> int:
    """Return how many more attempts may start after the open one has ended and is counted."""
    return max(0, max_attempts - spent - 1)


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A worker's right to act for a job. Nothing can be written about a running job without one.

    Its fields are the columns of the statement `claim`, in that order; JSON stays text until it is needed.
    """

    id: str
    token: int
    attempt: int
    domain: str
    tenant: str
    queue: str
    capability: str
    lane: str | None
    kind: str
    spent: int
    max_attempts: int
    spec_json: str
    inputs_json: str
    policy_json: str | None = None
    usage_json: str | None = None
    adoption_json: str | None = None

    @property
    def runner(self) -> RunnerName:
        return cast(RunnerName, self.capability.partition(":")[0])

    @property
    def spec(self) -> Json:
        return msgspec.json.decode(self.spec_json)

    @property
    def inputs(self) -> Json:
        return msgspec.json.decode(self.inputs_json)

    @property
    def policy(self) -> Policy:
        return Policy() if self.policy_json is None else decoding.decode(self.policy_json, Policy)

    @property
    def has_budget(self) -> bool:
        """Whether the finish has to check the usage. Tests the text first, which is cheap: most jobs have no budget."""
        return self.policy_json is not None and '"budget"' in self.policy_json and self.policy.budget is not None

    @property
    def usage(self) -> Mapping[str, float]:
        return {} if self.usage_json is None else decoding.decode(self.usage_json, dict[str, float])

    @property
    def attempts_left(self) -> int:
        return attempts_left(self.spent, self.max_attempts)

    @property
    def adopted(self) -> bool:
        return self.adoption_json is not None

    @property
    def adoption(self) -> Adoption:
        """The state of the attempt; that of a new attempt is empty."""
        if self.adoption_json is None:
            function = self.runner == "function"
            return Adoption(phase=Phase.STARTED if function else Phase.CLAIMED, adoptions=0)
        return decoding.decode(self.adoption_json, Adoption)


_ENDS = MOVES[Verb.FINISH][Status.RUNNING] | MOVES[Verb.REQUEUE][Status.RUNNING]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, and the new status of its job."""

    status: Status
    cause: Cause = Cause.EXIT
    exit_code: int | None = None
    signal: int | None = None
    error: Error | None = None
    result: Json = None
    delay: float = 0.0

    def __post_init__(self) -> None:
        if self.status not in _ENDS:
            raise ValueError(f"a running job cannot become {self.status}")
        if self.status is Status.SUCCEEDED and self.error is not None:
            raise ValueError("a job that succeeded has no error")
        if self.delay < 0:
            raise ValueError("delay is a duration, at least 0")

    @classmethod
    def succeeded(cls, result: Json = None, exit_code: int | None = None) -> "Outcome":
        return cls(status=Status.SUCCEEDED, result=result, exit_code=exit_code)

    @classmethod
    def failed(cls, code: str, message: str, *, cause: Cause = Cause.EXIT, exit_code: int | None = None) -> "Outcome":
        return cls(status=Status.FAILED, cause=cause, exit_code=exit_code, error=Error(code=code, message=message))

    @classmethod
    def requeued(cls, cause: Cause, *, delay: float = 0.0, error: Error | None = None) -> "Outcome":
        return cls(status=Status.QUEUED, cause=cause, delay=delay, error=error)


HandOverReason = Literal["leaving", "engine_unreachable", "failed", "unanswered_claim"]
"""Why a worker releases a lease: it stops, cannot reach the engine, failed with the job, or lost the claim's reply."""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat returns for one job."""

    id: str
    token: int
    answer: Literal["yours", "lost", "unknown"]
    stop_request: StopRequest | None = None
    capability: str | None = None
    phase: Phase | None = None


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat returns."""

    jobs: tuple[Beat, ...]
    registered: bool
    draining: bool


class Event(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    at: datetime
    type: str
    task: str | None
    data: Json


class NewEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str
    data: Json
    task: str | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a job. `worker` claimed it; `last_worker` owned it last, which differs if it was adopted."""

    attempt: int
    worker: str | None
    last_worker: str | None
    domain: str | None
    token: int
    claimed_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    phase: Phase | None
    cause: Cause | None
    exit_code: int | None
    signal: int | None
    error: Error | None


class TaskStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A task of a pipeline as people see it. `snapshot` is the id of its result, stored or not; None until planned."""

    n: int
    name: str
    status: TaskStatus = TaskStatus.PENDING
    cached: bool = False
    parent: str | None = None
    snapshot: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    exit_code: int | None = None


class RecordedFolder(msgspec.Struct, frozen=True, kw_only=True):
    """The shared folder recorded in the database, with its path on the host that recorded it."""

    id: str
    path: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The stored workspace after a task. `components` is what it depends on; `folder` and `digest` locate it."""

    id: str
    tenant: str
    parent: str
    task: str
    task_hash: str
    components: Mapping[str, str]
    folder: str
    digest: str
    size: int
    made_at: datetime
    used_at: datetime
    job_id: str


class OutputFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file that a task left in `output/`."""

    path: str
    size: int
    sha256: str


class Outputs(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of a pipeline's tasks up to one of them, stored with that task's snapshot.

    `report` is the content of `result.json`, with secrets masked; None if there was none.
    """

    files: tuple[OutputFile, ...] = ()
    report: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class LaneState(StrEnum):
    IDLE = "idle"
    ACTIVE = "active"
    BLOCKED = "blocked"
    PAUSED = "paused"


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    lane: str
    state: LaneState
    head: str | None
    blockers: tuple[str, ...]
    depth: int
    check: Check | None = None


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    queue: str
    paused: bool
    cap: int | None
    depth: int | None


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    host: str
    pid: int
    queues: Mapping[str, int]
    capabilities: tuple[str, ...]
    domains: tuple[str, ...]
    away: Mapping[str, str]
    """What it cannot run now because its engine is unreachable, and why."""
    registered_at: datetime
    seen_at: datetime
    live: bool
    draining: bool
    jobs: tuple[str, ...]
    figures: Mapping[str, Any] = {}


class Role(StrEnum):
    """What the holder of a token may do; each role includes the ones before it."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, other: "Role") -> bool:
        order = list(Role)
        return order.index(self) >= order.index(other)


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """Who may call the service. An admin token belongs to the installation, every other token to one tenant."""

    id: str
    name: str
    role: Role
    tenant: str | None
    created_at: datetime
    expires_at: datetime | None
    created_by: str | None = None
    used_at: datetime | None = None
    """When it was last used, to about a quarter of a minute."""


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """Who makes a change, as the audit trail names it; without a token, by the account of the process."""

    name: str
    token_id: str | None = None
    role: Role | None = None
    address: str | None = None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the audit trail. `tenant` is the owner of the subject; null if that belongs to the installation."""

    id: int
    done_at: datetime
    actor: str
    token_id: str | None
    role: Role | None
    address: str | None
    tenant: str | None
    action: str
    subject: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    reason: str | None


class Claimable(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker can run: jobs of this queue and capability, whose attempts are found again in this domain."""

    queue: str
    capability: str
    domain: str


FUNCTION_DOMAIN = "function"
"""Functions die with their worker, so any worker may settle an orphaned one."""


def new_worker_id() -> str:
    """Return host, pid and a random nonce: never reused, not even by the same pid in a restarted container."""
    return f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"


class _IdSource:
    """Makes UUIDv7 ids that grow within this process, even within one millisecond."""

    POOL = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._random = b""
        # A forked child must not reuse its parent's random bytes.
        os.register_at_fork(after_in_child=self.__init__)  # type: ignore[misc]

    def next(self) -> str:
        with self._lock:
            self._last = head = max(self._last + 1, (time.time_ns() // 1_000_000) << 12)
            if not self._random:
                self._random = os.urandom(self.POOL)
            tail, self._random = self._random[:8], self._random[8:]
        return _uuid7(head, tail)


def _uuid7(head: int, tail: bytes) -> str:
    text = f"{head >> 12:012x}"
    rest = tail.hex()
    return f"{text[:8]}-{text[8:]}-7{head & 0xFFF:03x}-{_VARIANT[tail[0] & 3]}{rest[1:4]}-{rest[4:]}"


_VARIANT = "89ab"
new_id = _IdSource().next
