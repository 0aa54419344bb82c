"""A job as people see it: its rules, attempts, tasks and events."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.model.lifecycle import Cause, Gate, Phase, Status, StopKind, StopPhase

Json = Any

RunnerName = Annotated[str, Meta(min_length=1, max_length=63)]
"""The name of a runner in the registry. A job keeps its runner's name also where that runner is not installed."""

FUNCTION = "function"
"""The one runner whose jobs the worker itself runs; they have defaults by their name in the database."""

OnLost = Literal["requeue", "fail", "pause", "hold"]
"""What follows a lost attempt. `hold` is the old name of `pause`: it is accepted everywhere and read as `pause`."""


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


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a job's history. `seq` counts from 1 per job without a gap."""

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
