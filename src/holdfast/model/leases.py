"""What a worker works with: what it can claim, its leases, heartbeats, and the outcome of an attempt."""

import os
import socket
from collections.abc import Mapping
from typing import Literal

import msgspec

from holdfast import decoding
from holdfast.model.jobs import Error, Json, Policy, RunnerName, StopRequest
from holdfast.model.lifecycle import MOVES, Cause, Phase, Status, Verb

FUNCTION_DOMAIN = "function"
"""The domain of attempts that die with their worker: functions, and runners that are not adoptable.

They start with the claim, without a write of their own, and any worker may settle an orphaned one.
"""


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
        return self.capability.partition(":")[0]

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
            return Adoption(phase=Phase.STARTED if self.domain == FUNCTION_DOMAIN else Phase.CLAIMED, adoptions=0)
        return decoding.decode(self.adoption_json, Adoption)


_SUCCEEDED = Status.SUCCEEDED
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
        if self.status is _SUCCEEDED and self.error is not None:
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


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat returns."""

    jobs: tuple[Beat, ...]
    registered: bool
    draining: bool


class Claimable(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker can run: jobs of this queue and capability, whose attempts are found again in this domain."""

    queue: str
    capability: str
    domain: str


def new_worker_id() -> str:
    """Return host, pid and a random nonce: never reused, not even by the same pid in a restarted container."""
    return f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
