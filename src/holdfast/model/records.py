"""Records beside the jobs: lanes, queues, workers, snapshots, tokens, the audit trail."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from holdfast.model.jobs import Check


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
