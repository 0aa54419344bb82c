"""What a store promises, as a model in plain Python: no SQL, no gates to resolve, one thread.

It follows the design, and the statements only where the design is silent. Each verb changes the model as the store must
change its rows, or raises `Refused` with the error that the store must raise. `record` and `history` say what a reader
must see.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from holdfast.errors import Conflict, NeedFailed, NotFound
from holdfast.model import (
    BROKEN,
    FUNCTION_DOMAIN,
    Cause,
    Claimable,
    Gate,
    Json,
    Lease,
    Outcome,
    Phase,
    Status,
    StopKind,
    StopPhase,
    Verb,
)
from holdfast.timing import backoff
from tests.support.reference_jobs import WEARY, RefJob, RefLane, refuse
from tests.support.reference_state import ReferenceState


class Reference(ReferenceState):
    """The verbs of callers and workers, and the duties."""

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
                job.record(self.now, "cancel:requested")
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
            job.record(self.now, "audit:dismiss")
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
            job.record(self.now, "lease:adopted")
            job.adoptions += 1
            job.orphaned_at = None
            self._own(job, worker)
        return sorted(found, key=lambda job: job.id)

    def start(self, lease: Lease) -> bool:
        if (job := self.held_by(lease)) is None:
            return False
        job.phase = Phase.STARTED
        job.adoptions = 0
        job.record(self.now)
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
        job.record(self.now, "log:", "usage:")
        return "landed"

    def advance_stop(self, lease: Lease, phase: StopPhase) -> bool:
        job = self.held_by(lease)
        if job is None or job.stop is None:
            return False
        job.record(self.now, f"cancel:{phase}")
        return True

    def finish(self, ends: Iterable[tuple[Lease, Outcome]]) -> dict[str, Status | None]:
        answers = {lease.id: self._finish(lease, outcome) for lease, outcome in ends}
        self._settle()
        return answers

    def hand_over(self, lease: Lease, delay: float, *, adoption_failed: bool = False) -> bool:
        if (job := self.held_by(lease)) is None:
            return False
        self._orphan(job, "lease:handed_over", delay)
        job.adoptions = job.adoptions if adoption_failed else 0
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
        found = [job for job in self.jobs.values() if job.possibly_lost and job.domain in domains]
        for job in found:
            self._take_back(job)
            self._settle()
        return {job.id for job in found}

    def lose(self, domain: str) -> Sequence[str]:
        """A person says that a domain is gone."""
        found = sorted(
            (job for job in self.jobs.values() if job.domain == domain and (job.orphaned or job.possibly_lost)),
            key=lambda job: job.id,
        )
        for job in found:
            if job.possibly_lost:
                self._take_back(job)
            job.record(self.now, "audit:lost")
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
        adoption_failed = [job for job in self.jobs.values() if job.orphaned and job.adoptions >= WEARY]
        for job in adoption_failed:
            job.token += 1
            job.orphaned_at = None
            self._move(job, Status.PAUSED, error="internal")
            self._settle()
        return len(adoption_failed)

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
