"""What a store promises, as a model in plain Python: no SQL, no gates to resolve, one thread.

It follows the design, and the statements only where the design is silent. Each verb changes the model as the store must
change its rows, or raises `Refused` with the error that the store must raise. `record` and `history` say what a reader
must see.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NoReturn

from holdfast.errors import Conflict, HoldfastError, IllegalMove, NeedFailed, NotFound
from holdfast.model import (
    BROKEN,
    FUNCTION_DOMAIN,
    WAITING,
    Cause,
    Claimable,
    Gate,
    Json,
    LaneState,
    Lease,
    LeaseView,
    OnLost,
    Outcome,
    Phase,
    Status,
    StopKind,
    StopPhase,
    Verb,
    is_legal,
)
from holdfast.timing import Clock, backoff

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
    ledger: list[tuple[Cause, bool]] = field(default_factory=list)  # ended attempts: why, and whether they had started
    stop: StopKind | None = None
    dismissed: bool = False
    error: str | None = None
    result: Json = None
    usage: dict[str, float] = field(default_factory=dict)
    history: list[tuple[str, datetime]] = field(default_factory=list)

    @property
    def attempt(self) -> int:
        return len(self.ledger) + (self.phase is not None)

    @property
    def attempts(self) -> int:
        """DESIGN §4: those that reached `started`, or ended `lost` or `start_failed`, and did not end `drained`."""
        counted = (
            cause is not Cause.DRAINED and (started or cause in (Cause.LOST, Cause.START_FAILED))
            for cause, started in self.ledger
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
    def feared_lost(self) -> bool:
        """Paused because nobody reaches it: its attempt may still run."""
        return self.status is Status.PAUSED and self.error == "lost" and self.phase is not None

    def tell(self, now: datetime, *labels: str) -> None:
        """Write to the row and its history. Stored times never go back."""
        self.updated_at = max(now, self.updated_at)
        self.history += [(label, self.updated_at) for label in labels]

    def end_attempt(self, cause: Cause) -> None:
        if self.phase is not None:
            self.ledger.append((cause, self.phase is Phase.STARTED))
        self.phase = self.owner = self.expires_at = self.orphaned_at = None


@dataclass
class RefLane:
    holder: str | None = None
    paused: bool = False
    positions: int = 0


class Reference:
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

    # What callers do

    def submit(self, jobs: Sequence[Mapping[str, Any]]) -> None:
        inside = {job["id"] for job in jobs}
        for need in sorted({need for job in jobs for need in job["needs"]} - inside):
            if need not in self.jobs:
                refuse(NotFound)
            if self.jobs[need].status in BROKEN:
                refuse(NeedFailed)
        for fields in sorted(jobs, key=lambda job: str(job["id"])):
            self._accept(fields)
        self._settle()

    def release(self, job_id: str) -> None:
        job = self._find(job_id, Verb.RELEASE)
        self._queue(job)
        self._settle()

    def stop(self, verb: Verb, kind: StopKind, job_id: str) -> str:
        job = self._find(job_id, verb)
        if job.status is Status.RUNNING:
            if kind.escalates(job.stop):
                job.stop = kind
                job.tell(self.now, "cancel:requested")
            return "stopping"
        if job.status is Status.CANCELLED or (job.status is Status.PAUSED and kind is StopKind.INTERRUPT):
            return "already"
        job.given_up = job.given_up or job.phase is not None
        job.end_attempt(Cause.LOST)
        job.result = None
        if StopKind.DELETE in (kind, job.stop):
            job.stop = StopKind.DELETE
        self._move(job, Status.CANCELLED, error="cancelled")
        self._settle()
        return "ended"

    def resume(self, job_id: str, *, stopped: bool) -> None:
        job = self._find(job_id, Verb.RESUME)
        may_run = job.phase is not None or job.given_up
        if job.stop is StopKind.DELETE or (may_run and not stopped):
            refuse(Conflict)
        for need in self.broken_needs(job):
            refuse(NeedFailed if need in self.jobs else Conflict)
        job.end_attempt(Cause.LOST)
        job.max_attempts = max(job.max_attempts, job.attempts + 1)
        job.result = job.stop = None
        job.dismissed = False
        job.adoptions = 0
        self._queue(job, "audit:resume")
        self._settle()

    def resolve(self, job_id: str, result: Json) -> None:
        job = self._find(job_id, Verb.RESOLVE)
        job.end_attempt(Cause.LOST)
        job.result = result
        job.dismissed = False
        self._move(job, Status.SUCCEEDED, "audit:resolve")
        self._settle()

    def dismiss(self, job_id: str) -> None:
        job = self._find(job_id, Verb.DISMISS)
        if not job.dismissed:
            job.dismissed = True
            job.tell(self.now, "audit:dismiss")
            self._settle()

    def delete(self, job_id: str, *, force: bool) -> str:
        job = self._find(job_id)
        if not job.status.terminal:
            if not force:
                refuse(Conflict)
            self.stop(Verb.CANCEL, StopKind.DELETE, job_id)
        if not job.status.terminal:
            return "deleting"
        self._remove(job)
        return "deleted"

    def pause_lane(self, name: str, paused: bool) -> None:
        self.lanes.setdefault(name, RefLane()).paused = paused
        self._settle()

    def pause_queue(self, name: str, paused: bool) -> None:
        (self.paused_queues.add if paused else self.paused_queues.discard)(name)

    # What workers do

    def claim(self, worker: str, pairs: Sequence[Claimable], slots: int) -> Sequence[RefJob]:
        domains = {(pair.queue, pair.capability): pair.domain for pair in pairs}
        ready = [job for job in self.open_jobs() if (job.queue, job.capability) in domains]
        ready.sort(key=lambda job: (-job.priority, job.requested_at, job.id))
        for job in ready[:slots]:
            self._move(job, Status.RUNNING, error=job.error)
            job.started_at = job.started_at or job.updated_at
            job.given_up = False
            job.domain = domains[job.queue, job.capability]
            job.phase = Phase.STARTED if job.domain == FUNCTION_DOMAIN else Phase.CLAIMED
            job.batch = job.adoptions = 0
            self._own(job, worker)
        return ready[:slots]

    def adopt(self, worker: str, domains: Collection[str]) -> Sequence[RefJob]:
        found = [
            job
            for job in self.jobs.values()
            if job.orphaned and job.domain in domains and job.adopt_after_at and job.adopt_after_at <= self.now
        ]
        for job in found:
            job.tell(self.now, "lease:adopted")
            job.adoptions += 1
            job.orphaned_at = None
            self._own(job, worker)
        return sorted(found, key=lambda job: job.id)

    def held_by(self, lease: Lease) -> RefJob | None:
        """The job that this lease may still write about."""
        job = self.jobs.get(lease.id)
        return job if job and job.status is Status.RUNNING and job.token == lease.token else None

    def start(self, lease: Lease) -> bool:
        if (job := self.held_by(lease)) is None:
            return False
        job.phase = Phase.STARTED
        job.adoptions = 0
        job.tell(self.now)
        return True

    def beat(self, worker: str, leases: Iterable[Lease]) -> set[tuple[str, int, str, StopKind | None]]:
        answers: set[tuple[str, int, str, StopKind | None]] = set()
        for lease in leases:
            job = self.held_by(lease)
            if job is not None and job.owner == worker:
                job.expires_at = self.later(60)
                if self.now >= job.updated_at + timedelta(minutes=10):
                    job.adoptions = 0
                answers.add((job.id, job.token, "yours", job.stop))
            else:
                answers.add((lease.id, lease.token, "lost", None))
        known = {(job_id, token) for job_id, token, answer, _ in answers if answer == "yours"}
        mine = [job for job in self.jobs.values() if job.owner == worker]
        return answers | {(j.id, j.token, "unknown", j.stop) for j in mine if (j.id, j.token) not in known}

    def append(self, lease: Lease, batch: int, usage: Mapping[str, float]) -> str:
        if (job := self.held_by(lease)) is None:
            return "lost"
        if batch <= job.batch:
            return "repeated"
        job.batch = batch
        job.adoptions = 0
        for name, delta in usage.items():
            job.usage[name] = job.usage.get(name, 0) + delta
        job.tell(self.now, "log:", "usage:")
        return "landed"

    def advance_stop(self, lease: Lease, phase: StopPhase) -> bool:
        job = self.held_by(lease)
        if job is None or job.stop is None:
            return False
        job.tell(self.now, f"cancel:{phase}")
        return True

    def finish(self, ends: Iterable[tuple[Lease, Outcome]]) -> dict[str, Status | None]:
        answers = {lease.id: self._finish(lease, outcome) for lease, outcome in ends}
        self._settle()
        return answers

    def hand_over(self, lease: Lease, delay: float, *, worn: bool = False) -> bool:
        if (job := self.held_by(lease)) is None:
            return False
        self._orphan(job, "lease:handed_over", delay)
        job.adoptions = job.adoptions if worn else 0
        return True

    def die(self, worker: str) -> set[str]:
        mine = [job for job in self.jobs.values() if job.owner == worker]
        for job in mine:
            self._orphan(job, "lease:handed_over", backoff(job.adoptions, base=5, cap=300) if job.adoptions else 0)
        return {job.id for job in mine}

    # Duties

    def strand(self) -> int:
        """No worker is known here, so what runs in a domain is out of reach."""
        found = [job for job in self.jobs.values() if job.orphaned and job.domain != FUNCTION_DOMAIN]
        far = [job for job in found if job.orphaned_at is not None and job.orphaned_at < self.now]
        for job in far:
            job.token += 1
            job.orphaned_at = job.result = None
            self._move(job, Status.PAUSED, error="lost")
            self._settle()
        return len(far)

    def recover(self, domains: Collection[str]) -> set[str]:
        found = [job for job in self.jobs.values() if job.feared_lost and job.domain in domains]
        for job in found:
            self._take_back(job)
            self._settle()
        return {job.id for job in found}

    def lose(self, domain: str) -> Sequence[str]:
        """A person says that a domain is gone."""
        found = sorted(
            (job for job in self.jobs.values() if job.domain == domain and (job.orphaned or job.feared_lost)),
            key=lambda job: job.id,
        )
        for job in found:
            if job.feared_lost:
                self._take_back(job)
            job.tell(self.now, "audit:lost")
            job.end_attempt(Cause.LOST)
            job.result = None
            self._move(job, Status.PAUSED if job.on_lost in ("pause", "hold") else Status.FAILED, error="lost")
            self._settle()
        return [job.id for job in found] or refuse(NotFound)

    def _take_back(self, job: RefJob) -> None:
        if job.lane is not None:
            assert self.lanes[job.lane].holder is None
            self.lanes[job.lane].holder = job.id
        self._move(job, Status.RUNNING)
        job.result = None
        job.orphaned_at = job.updated_at
        job.adopt_after_at = self.now

    def promote(self) -> int:
        ripe = [job for job in self.jobs.values() if self.gate(job) is Gate.FUTURE and job.available_at <= self.now]
        for job in ripe:
            job.due = True
        self._settle()
        return len(ripe)

    def reap(self) -> set[str]:
        expired = [job for job in self.jobs.values() if job.expires_at is not None and job.expires_at < self.now]
        for job in expired:
            wait = backoff(job.adoptions, base=5, cap=300) if job.adoptions else 0
            self._orphan(job, "lease:reaped", wait)
        return {job.id for job in expired}

    def abandon(self) -> int:
        worn = [job for job in self.jobs.values() if job.orphaned and job.adoptions >= WEARY]
        for job in worn:
            job.token += 1
            job.orphaned_at = None
            self._move(job, Status.PAUSED, error="internal")
            self._settle()
        return len(worn)

    def expire(self) -> int:
        overdue = [job for job in self.jobs.values() if job.deadline_at is not None and job.deadline_at <= self.now]
        ended = 0
        for job in sorted(overdue, key=lambda job: job.deadline_at or self.now):
            if job.status is Status.QUEUED:
                self._move(job, Status.TIMED_OUT, error="queue_timeout")
                self._settle()
                ended += 1
        return ended

    def purge(self) -> int:
        def doomed(job: RefJob) -> bool:
            return job.stop is StopKind.DELETE and (job.status.terminal or job.status is Status.PAUSED)

        removed = [job for job in self.jobs.values() if doomed(job)]
        for job in removed:
            self._remove(job)
        return len(removed)

    # Steps

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
            job.tell(self.now, "status:pending")
        else:
            self._queue(job)

    def _move(self, job: RefJob, status: Status, *labels: str, error: str | None = None) -> None:
        job.tell(self.now, *labels, f"status:{status}")
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
        job.tell(self.now, label)
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
        first_loss = outcome.cause is Cause.LOST and all(cause is not Cause.LOST for cause, _ in job.ledger)
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
