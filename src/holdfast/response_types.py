"""Response types that are not in `model`: the service returns them, and clients decode them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from holdfast.model import Job, RunnerName, Status, TaskRecord

Subject = Literal["status", "held", "due", "needs", "lane", "unresolved", "queue", "worker", "plan", "build"]


class Links(msgspec.Struct, frozen=True, kw_only=True):
    self: str
    events: str
    stream: str
    artifacts: str


class JobView(Job, frozen=True, kw_only=True):
    """A job, and where to find more of it."""

    tasks: Sequence[TaskRecord] = ()
    links: Links


class ArtifactView(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size: int
    href: str


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    about: Subject
    message: str
    jobs: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One component that a task does not share with the nearest known snapshot."""

    component: str
    change: Literal["changed", "added", "removed"]


class TaskPlanView(msgspec.Struct, frozen=True, kw_only=True):
    """`cached`: it would not run. `differs` names the components that `nearest`, a known snapshot, does not share."""

    name: str
    snapshot: str
    cached: bool
    reason: str
    nearest: str | None = None
    differs: tuple[Difference, ...] = ()


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """`plan` is the same for the same plan; `runs` is how many tasks would run."""

    plan: str
    runs: int
    tasks: tuple[TaskPlanView, ...]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Without a reason, the next worker with a free slot claims the job. For a pipeline, also the plan."""

    id: str
    status: Status
    reasons: tuple[Reason, ...]
    plan: PlanView | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs of a queue wait, by gate, and run; counted at most 10 s ago."""

    open: int = 0
    future: int = 0
    needs: int = 0
    lane: int = 0
    held: int = 0
    unresolved: int = 0
    running: int = 0


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    queue: str
    paused: bool
    max_running: int | None
    max_depth: int | None
    counts: Load


class ToolView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str
    runner: RunnerName
    inputs: Mapping[str, Any]
