"""The state of the reference model: what a reader sees, and how lanes and dependencies settle after a change."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from holdfast.errors import IllegalMove, NotFound
from holdfast.model import (
    BROKEN,
    WAITING,
    Cause,
    Gate,
    LaneState,
    Lease,
    LeaseView,
    Outcome,
    Status,
    StopKind,
    Verb,
    is_legal,
)
from holdfast.timing import Clock
from tests.support.reference_jobs import RefJob, RefLane, refuse


class ReferenceState:
    """The jobs and lanes, what a reader sees of them, and the steps that the verbs are made of."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.jobs: dict[str, RefJob] = {}
        self.lanes: dict[str, RefLane] = {}
        self.paused_queues: set[str] = set()
        self.succeeded: set[str] = set()  # outlives a deleted job: a need that succeeded stays satisfied

    @property
    def now(self) -> datetime:
        return self._clock.now()

    def later(self, seconds: float) -> datetime:
        return self.now + timedelta(seconds=seconds)

    # What a reader sees

    def record(self, job: RefJob) -> dict[str, object]:
        lease = None
        if job.owner is not None and job.expires_at is not None:
            lease = LeaseView(owner=job.owner, token=job.token, expires_at=job.expires_at)
        return {
            "status": job.status,
            "gate": self.gate(job),
            "queue": job.queue,
            "lane": job.lane,
            "priority": job.priority,
            "attempt": job.attempt,
            "attempts": job.attempts,
            "max_attempts": job.max_attempts,
            "requested_at": job.requested_at,
            "available_at": job.available_at,
            "started_at": job.started_at,
            "finished_at": job.finished_at,
            "updated_at": job.updated_at,
            "lease": lease,
            "orphaned_at": job.orphaned_at,
            "dismissed": job.dismissed,
            "error": job.error,
            "result": job.result,
            "usage": job.usage,
            "last_seq": len(job.history),
            "stop": job.stop if job.status is Status.RUNNING or job.stop is StopKind.DELETE else None,
        }

    def open_jobs(self) -> Sequence[RefJob]:
        """Jobs that a worker may claim."""
        jobs = (job for job in self.jobs.values() if job.queue not in self.paused_queues)
        return [job for job in jobs if self.gate(job) is Gate.OPEN]

    def gate(self, job: RefJob) -> Gate | None:
        if job.status not in WAITING:
            return None
        if job.status is Status.PENDING:
            return Gate.HELD
        if not self.needs_met(job):
            return Gate.NEEDS
        if not job.due:
            return Gate.FUTURE
        if job.lane is None:
            return Gate.OPEN
        lane = self.lanes[job.lane]
        may_go = lane.holder == job.id and not lane.paused and not self.blockers(job.lane)
        return Gate.OPEN if may_go else Gate.LANE

    def lane(self, name: str) -> tuple[LaneState, str | None, tuple[str, ...]]:
        """The state, head and blockers of a lane."""
        lane, blockers = self.lanes[name], self.blockers(name)
        state = LaneState.ACTIVE if lane.holder else LaneState.IDLE
        state = LaneState.PAUSED if lane.paused else LaneState.BLOCKED if blockers else state
        waiting = [*blockers, *self._eligible(name)]
        return state, lane.holder or (waiting[0].id if waiting else None), tuple(job.id for job in blockers)

    def blockers(self, name: str) -> Sequence[RefJob]:
        return [job for job in self._in_lane(name) if job.blocks_lane]

    def needs_met(self, job: RefJob) -> bool:
        return job.needs <= self.succeeded

    def broken_needs(self, job: RefJob) -> Sequence[str]:
        """Needs that ended badly or were deleted before they succeeded."""
        return [n for n in sorted(job.needs - self.succeeded) if n not in self.jobs or self.jobs[n].status in BROKEN]

    # Steps

    def held_by(self, lease: Lease) -> RefJob | None:
        """The job that this lease may still write about."""
        job = self.jobs.get(lease.id)
        return job if job and job.status is Status.RUNNING and job.token == lease.token else None

    def _find(self, job_id: str, verb: Verb | None = None) -> RefJob:
        job = self.jobs.get(job_id) or refuse(NotFound)
        if verb is not None and not is_legal(verb, job.status):
            refuse(IllegalMove)
        return job

    def _accept(self, fields: Mapping[str, Any]) -> None:
        status = Status.PENDING if fields["hold"] else Status.QUEUED
        job = RefJob(
            id=fields["id"],
            queue=fields["queue"],
            capability="function:f" if fields["runner"] == "function" else fields["runner"],
            lane=fields["lane"],
            priority=fields["priority"],
            needs=frozenset(fields["needs"]),
            held=fields["hold"],
            requested_at=self.now,
            available_at=max(fields["available_at"] or self.now, self.now),
            max_attempts=fields["max_attempts"],
            on_lost=fields["on_lost"],
            queue_timeout=fields["queue_timeout"],
            status=status,
            updated_at=self.now,
        )
        self.jobs[job.id] = job
        if job.lane is not None:
            lane = self.lanes.setdefault(job.lane, RefLane())
            lane.positions += 1
            job.position = lane.positions
        if job.held:
            job.record(self.now, "status:pending")
        else:
            self._queue(job)

    def _move(self, job: RefJob, status: Status, *labels: str, error: str | None = None) -> None:
        job.record(self.now, *labels, f"status:{status}")
        job.status = status
        job.error = error
        job.finished_at = job.updated_at if status.terminal else None
        job.due = job.deadline_at = None
        job.held = job.held and status in (Status.PENDING, Status.FAILED)
        if status is Status.SUCCEEDED:
            self.succeeded.add(job.id)

    def _queue(self, job: RefJob, *labels: str) -> None:
        self._move(job, Status.QUEUED, *labels, error=job.error)
        self._look(job)
        if job.queue_timeout is not None and job.started_at is None:
            job.deadline_at = max(self.now, job.available_at) + timedelta(seconds=job.queue_timeout)

    def _look(self, job: RefJob) -> None:
        """Look whether a job is due, once, when nothing but time may hold it back. After that, `promote` looks."""
        if job.status is Status.QUEUED and job.due is None and self.needs_met(job):
            job.due = job.available_at <= self.now

    def _own(self, job: RefJob, worker: str) -> None:
        job.token += 1
        job.owner = worker
        job.expires_at = self.later(60)

    def _orphan(self, job: RefJob, label: str, wait: float) -> None:
        job.record(self.now, label)
        job.token += 1
        job.owner = job.expires_at = None
        job.orphaned_at = job.updated_at
        job.adopt_after_at = self.later(wait)

    def _finish(self, lease: Lease, outcome: Outcome) -> Status | None:
        if (job := self.held_by(lease)) is None:
            # A repeat after a lost answer: the same token and no open attempt mean that it landed.
            job = self.jobs.get(lease.id)
            return job.status if job and job.token == lease.token and job.phase is None else None
        status = outcome.status
        error = None if outcome.error is None else outcome.error.code
        if status is Status.QUEUED and job.stop is not None:
            interrupted = job.stop is StopKind.INTERRUPT
            status, error = (Status.PAUSED, "interrupted") if interrupted else (Status.CANCELLED, "cancelled")
        first_loss = outcome.cause is Cause.LOST and all(cause is not Cause.LOST for cause, _ in job.ended)
        job.end_attempt(outcome.cause)
        job.result = outcome.result
        self._move(job, status, error=error)
        if status is Status.QUEUED:
            delay = 0.0 if first_loss else outcome.delay
            job.available_at = job.updated_at + timedelta(seconds=delay)
            job.due = not delay
        return status

    def _remove(self, job: RefJob) -> None:
        del self.jobs[job.id]
        self._settle()

    def _settle(self) -> None:
        """Move the lanes, then show every change to the dependants, level by level."""
        self._settle_lanes()
        while self._settle_needs():
            self._settle_lanes()

    def _settle_needs(self) -> bool:
        jobs = list(self.jobs.values())
        hopeless = [job for job in jobs if job.status in WAITING and self.broken_needs(job)]
        revived = [job for job in jobs if job.error == "dependency_failed" and job.status is Status.FAILED]
        revived = [job for job in revived if not self.broken_needs(job)]
        satisfied = [job for job in jobs if job.status is Status.QUEUED and job.due is None and self.needs_met(job)]
        for job in hopeless:
            self._move(job, Status.FAILED, error="dependency_failed")
        for job in revived:
            job.error = None
            job.dismissed = False
            if job.held:
                self._move(job, Status.PENDING)
            else:
                self._queue(job)
        for job in satisfied:
            self._look(job)
        return bool(hopeless or revived or satisfied)

    def _settle_lanes(self) -> None:
        for name, lane in self.lanes.items():
            holder = self.jobs.get(lane.holder or "")
            retrying = holder is not None and holder.status is Status.QUEUED and holder.started_at is not None
            if holder is not None and (holder.status is Status.RUNNING or retrying):
                continue
            stopped = lane.paused or self.blockers(name)
            waiting = () if stopped else self._eligible(name)
            lane.holder = waiting[0].id if waiting else None

    def _in_lane(self, name: str) -> Sequence[RefJob]:
        return sorted((job for job in self.jobs.values() if job.lane == name), key=lambda job: job.position)

    def _eligible(self, name: str) -> Sequence[RefJob]:
        return [job for job in self._in_lane(name) if job.status is Status.QUEUED and job.due and self.needs_met(job)]
