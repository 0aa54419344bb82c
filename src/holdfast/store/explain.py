"""Why is this job not running? One reason per gate, in words, which names the jobs and workers involved."""

from collections.abc import Iterator, Sequence
from datetime import timedelta

from holdfast.errors import NotFound
from holdfast.model import FUNCTION_DOMAIN, Gate, Job, LaneState, Queue, Status, TaskRecord, TaskStatus, WorkerRecord
from holdfast.pipeline_spec import pipeline_of
from holdfast.response_types import Explanation, Reason
from holdfast.runner_specs import capability_of
from holdfast.store.database import Database, Row
from holdfast.store.jobs import Jobs
from holdfast.store.lanes import Lanes
from holdfast.store.queues import Queues
from holdfast.store.rows import to_json
from holdfast.store.tasks import Tasks
from holdfast.store.workers import Workers


class Explain:
    def __init__(
        self,
        database: Database,
        jobs: Jobs,
        lanes: Lanes,
        queues: Queues,
        workers: Workers,
        tasks: Tasks,
    ) -> None:
        self._database = database
        self._jobs = jobs
        self._lanes = lanes
        self._queues = queues
        self._workers = workers
        self._tasks = tasks

    async def job(self, job_id: str, *, tenant: str = "default") -> Explanation:
        job = await self._jobs.get(job_id, tenant=tenant)
        if job.status in (Status.QUEUED, Status.PENDING):
            reasons = [*await self._gates(job), *await self._outside(job)]
        else:
            reasons = [await self._status(job), *await self._next_task(job)]
        return Explanation(id=job.id, status=job.status, reasons=tuple(reasons))

    async def _gates(self, job: Job) -> list[Reason]:
        """Return what the job itself waits for."""
        reasons = []
        if job.status is Status.PENDING:
            reasons.append(Reason(about="held", message="it was submitted with hold; release it"))
        if job.gate is Gate.UNRESOLVED:
            text = "its lane and needs are not resolved yet; any worker or server does so within a second"
            reasons.append(Reason(about="unresolved", message=text))
        reasons += await self._needs(job)
        now = (await self._database.read("now"))[0]["now_at"]
        if job.available_at > now:
            what = f"attempt {job.attempt + 1} waits" if job.attempt else "not due"
            why = f", as attempt {job.attempt} ended: {job.error.code}, {job.error.message}" if job.error else ""
            reasons.append(Reason(about="due", message=f"{what} until {job.available_at.isoformat()}{why}"))
        if job.lane is not None and job.gate is not Gate.OPEN:
            reasons += await self._lane(job, job.lane)
        return reasons

    async def _needs(self, job: Job) -> list[Reason]:
        open_needs = [row["need_id"] for row in await self._database.read("open_needs", id=job.id)]
        if not open_needs:
            return []
        states = await self._database.read("need_states", tenant=job.tenant, ids=open_needs)
        statuses = {row["id"]: row["status"] for row in states}
        waits = [need for need in open_needs if statuses.get(need) != Status.SUCCEEDED]
        return [
            Reason(about="needs", message=f"needs job {need}, which is {statuses.get(need, 'deleted')}", jobs=(need,))
            for need in waits
        ]

    async def _lane(self, job: Job, name: str) -> list[Reason]:
        try:
            lane = await self._lanes.get(name, tenant=job.tenant)
        except NotFound:
            return []  # The lane is not resolved yet.
        if lane.state is LaneState.PAUSED:
            return [Reason(about="lane", message=f"lane {name} is paused; resume it")]
        if lane.blockers:
            first = await self._jobs.get(lane.blockers[0], tenant=job.tenant)
            remedy = (
                "resume, resolve or cancel it" if first.status is Status.PAUSED else "resume, resolve or dismiss it"
            )
            text = f"lane {name} is blocked by job {first.id}, which is {first.status}; {remedy}"
            return [Reason(about="lane", message=text, jobs=lane.blockers)]
        if lane.head is not None and lane.head != job.id:
            head = await self._jobs.get(lane.head, tenant=job.tenant)
            return [
                Reason(
                    about="lane", message=f"lane {name}: job {head.id} goes first and is {head.status}", jobs=(head.id,)
                )
            ]
        return []

    async def _outside(self, job: Job) -> list[Reason]:
        """Return the reasons that lie with the queue and the workers."""
        reasons = []
        queue = next((q for q in await self._queues.list() if q.queue == job.queue), None)
        if queue is not None:
            reasons += await self._queue(queue)
        workers = await self._workers.list()
        reasons += _workers(job, workers)
        return reasons

    async def _queue(self, queue: Queue) -> list[Reason]:
        if queue.paused:
            return [Reason(about="queue", message=f"queue {queue.queue} is paused; resume it")]
        if queue.cap is None:
            return []
        (row,) = await self._database.read("running_in_queue", queue=queue.queue)
        if row["running"] < queue.cap:
            return []
        return [
            Reason(about="queue", message=f"queue {queue.queue} is at its cap: {row['running']} of {queue.cap} run")
        ]

    async def _status(self, job: Job) -> Reason:
        if job.status is not Status.RUNNING:
            why = f": {job.error.code}, {job.error.message}" if job.error else ""
            after = {Status.PAUSED: "; resume, resolve or cancel it", Status.SUCCEEDED: ""}.get(
                job.status, "; it has ended"
            )
            return Reason(about="status", message=f"it is {job.status}{why}{after}")
        return await self._running(job)

    async def _running(self, job: Job) -> Reason:
        """Return whether its worker sends heartbeats; if not, which workers can adopt its attempt."""
        rows = await self._database.read("lease_state", id=job.id)
        if not rows:
            return Reason(about="status", message="it ended just now")
        row = rows[0]
        if row["owner"] is not None and _beats(row):
            text = (
                f"attempt {row['attempt']} runs on worker {row['owner']}; last heartbeat {_seconds(_silence(row))} ago"
            )
            return Reason(about="status", message=text, workers=(row["owner"],))
        live = [worker for worker in await self._workers.list() if worker.live and worker.worker != row["owner"]]
        able = [worker for worker in live if not worker.draining]
        reach = [worker.worker for worker in able if row["domain"] in (*worker.domains, FUNCTION_DOMAIN)]
        text = _unattended(row) + ("" if reach else _nobody(row["domain"])) + _away(job, live)
        return Reason(about="worker", message=text, workers=tuple(reach))

    async def _next_task(self, job: Job) -> list[Reason]:
        """Return what a running pipeline waits for while it runs no task: disk space, or a snapshot of another job."""
        pipeline = pipeline_of(job.spec)
        if pipeline is None or job.lease is None:
            return []
        left = [task for task in await self._tasks.of(job) if task.status is not TaskStatus.SUCCEEDED]
        if not left or left[0].status is not TaskStatus.PENDING:
            return []
        owner = [worker for worker in await self._workers.list() if worker.worker == job.lease.owner]
        away = [
            Reason(about="worker", message=f"task {left[0].name} has not started{why}", workers=(job.lease.owner,))
            for why in [_away(job, owner)]
            if why
        ]
        return [*away, *await self._build(job, next((task for task in left if pipeline.keeps(task.n)), None))]

    async def _build(self, job: Job, wanted: TaskRecord | None) -> list[Reason]:
        """Return the job whose snapshot a running pipeline waits for."""
        if wanted is None or wanted.snapshot is None:
            return []
        builds = await self._database.read("build_state", id=wanted.snapshot, tenant=job.tenant)
        builders = [row["job_id"] for row in builds if row["live"] and row["job_id"] != job.id]
        return [
            Reason(
                about="build",
                message=f"task {wanted.name} waits for job {other}, which builds its snapshot",
                jobs=(other,),
            )
            for other in builders
        ]


def _silence(row: Row) -> timedelta:
    silence: timedelta = row["now_at"] - row["last_beat_at"]
    return max(silence, timedelta())


def _beats(row: Row) -> bool:
    """Return whether heartbeats are on time: at least three fit into a lease, so after half of it one is overdue."""
    lease: timedelta = row["lease_expires_at"] - row["last_beat_at"]
    return 2 * _silence(row) <= lease


def _unattended(row: Row) -> str:
    """Describe the worker of an attempt whose heartbeats are overdue."""
    attempt, function = row["attempt"], row["domain"] == FUNCTION_DOMAIN
    if row["owner"] is None:
        return _orphaned(row)
    silent = _seconds(_silence(row))
    if row["lease_expires_at"] >= row["now_at"]:
        left = _seconds(row["lease_expires_at"] - row["now_at"])
        text = f"worker {row['owner']} has sent no heartbeat for {silent}"
        return (
            f"{text}; attempt {attempt} can be {'settled' if function else 'adopted'} when its lease expires, in {left}"
        )
    ago = _seconds(row["now_at"] - row["lease_expires_at"])
    text = f"the lease of worker {row['owner']} expired {ago} ago, after {silent} without a heartbeat"
    return f"{text}; attempt {attempt} waits to be {'settled' if function else 'adopted'}"


def _orphaned(row: Row) -> str:
    """Say which worker left an orphan and why, from the last event of its lease."""
    worker, attempt = row["last_worker"], f"attempt {row['attempt']}"
    event = to_json(row["lease_event"], {})
    waits = f"waits in {row['domain']} to be adopted"
    if row["domain"] == FUNCTION_DOMAIN:
        waits = "ended with it, which the next live worker records"
    text = {
        "leaving": f"worker {worker} stopped and handed {attempt} over, which {waits}",
        "engine_unreachable": f"worker {worker} cannot reach the engine of {attempt} and handed it over; it {waits}",
        "failed": f"worker {worker} failed at {attempt} and handed it over; it {waits}",
        "unanswered_claim": f"worker {worker} released {attempt}, as the reply to its claim was lost; it {waits}",
        "dead": f"worker {worker} died; {attempt} {waits}",
    }.get(event.get("reason"), f"worker {worker} was lost, its lease expired; {attempt} {waits}")
    after = row["adopt_after_at"]
    return text if after is None or after <= row["now_at"] else f"{text}, not before {after.isoformat()}"


def _nobody(domain: str) -> str:
    if domain == FUNCTION_DOMAIN:
        return ", but there is no live worker: start one with `holdfast worker`"
    return f", but no live worker reaches {domain}: start one there"


def _seconds(time: timedelta) -> str:
    return f"{time.total_seconds():.0f} s"


def _away(job: Job, workers: Sequence[WorkerRecord]) -> str:
    """Say which workers could run the job if their engine were reachable, or their disk had space."""
    wanted = capability_of(job.runner, job.spec)
    away = [f"{worker.worker}: {worker.away[wanted]}" for worker in workers if wanted in worker.away]
    return "".join(f"; {text}" for text in away)


def _workers(job: Job, workers: Sequence[WorkerRecord]) -> Iterator[Reason]:
    """Say why no worker claims the job: none is alive, none serves its queue or can run it, or all slots are taken."""
    live = [worker for worker in workers if worker.live and not worker.draining]
    serving = [worker for worker in live if job.queue in worker.queues]
    wanted = capability_of(job.runner, job.spec)
    able = [worker for worker in serving if wanted in worker.capabilities]
    if not live:
        yield Reason(about="worker", message="no live worker: start one with `holdfast worker`")
    elif not serving:
        names = tuple(worker.worker for worker in live)
        yield Reason(about="worker", message=f"no live worker serves queue {job.queue}", workers=names)
    elif not able:
        names = tuple(worker.worker for worker in serving)
        text = f"no live worker of queue {job.queue} can run {wanted}{_away(job, serving)}"
        yield Reason(about="worker", message=text, workers=names)
    elif all(len(worker.jobs) >= sum(worker.queues.values()) for worker in able):
        names = tuple(worker.worker for worker in able)
        yield Reason(about="worker", message=f"all slots are taken: {', '.join(names)}", workers=names)
