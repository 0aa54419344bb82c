"""The jobs and lanes of the reference model, and its refusals."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import NoReturn

from holdfast.errors import HoldfastError
from holdfast.model import (
    Cause,
    Json,
    OnLost,
    Phase,
    Status,
    StopKind,
)

WEARY = 5
"""Adoptions without progress after which an orphan waits for a person."""


class Refused(Exception):
    def __init__(self, error: type[HoldfastError]) -> None:
        super().__init__(error.__name__)
        self.error = error


def refuse(error: type[HoldfastError]) -> NoReturn:
    raise Refused(error)


@dataclass(kw_only=True)
class RefJob:
    id: str
    queue: str
    capability: str
    lane: str | None
    priority: int
    needs: frozenset[str]
    held: bool
    requested_at: datetime
    available_at: datetime
    max_attempts: int
    on_lost: OnLost
    queue_timeout: float | None
    status: Status
    updated_at: datetime
    position: int = 0
    due: bool | None = None  # None until somebody looked: before its needs succeeded, nobody does
    deadline_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    owner: str | None = None
    token: int = 0
    expires_at: datetime | None = None
    orphaned_at: datetime | None = None
    adopt_after_at: datetime | None = None
    adoptions: int = 0
    phase: Phase | None = None
    given_up: bool = False
    """Whether its last attempt was given up by a cancel, which does not say that it has stopped."""
    domain: str = ""
    batch: int = 0
    ended: list[tuple[Cause, bool]] = field(default_factory=list)  # ended attempts: why, and whether they had started
    stop: StopKind | None = None
    dismissed: bool = False
    error: str | None = None
    result: Json = None
    usage: dict[str, float] = field(default_factory=dict)
    history: list[tuple[str, datetime]] = field(default_factory=list)

    @property
    def attempt(self) -> int:
        return len(self.ended) + (self.phase is not None)

    @property
    def attempts(self) -> int:
        """DESIGN §4: those that reached `started`, or ended `lost` or `start_failed`, and did not end `drained`."""
        counted = (
            cause is not Cause.DRAINED and (started or cause in (Cause.LOST, Cause.START_FAILED))
            for cause, started in self.ended
        )
        return sum(counted) + (self.phase is Phase.STARTED)

    @property
    def blocks_lane(self) -> bool:
        ended_badly = self.status in (Status.FAILED, Status.TIMED_OUT) and not self.dismissed
        return self.started_at is not None and (self.status is Status.PAUSED or ended_badly)

    @property
    def orphaned(self) -> bool:
        return self.status is Status.RUNNING and self.owner is None

    @property
    def possibly_lost(self) -> bool:
        """Paused because nobody reaches it: its attempt may still run."""
        return self.status is Status.PAUSED and self.error == "lost" and self.phase is not None

    def record(self, now: datetime, *labels: str) -> None:
        """Write to the row and its history. Stored times never go back."""
        self.updated_at = max(now, self.updated_at)
        self.history += [(label, self.updated_at) for label in labels]

    def end_attempt(self, cause: Cause) -> None:
        if self.phase is not None:
            self.ended.append((cause, self.phase is Phase.STARTED))
        self.phase = self.owner = self.expires_at = self.orphaned_at = None


@dataclass
class RefLane:
    holder: str | None = None
    paused: bool = False
    positions: int = 0
