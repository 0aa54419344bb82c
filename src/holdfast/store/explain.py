"""Why is this job not running? One reason per gate, in words, with the jobs and workers named."""

from collections.abc import Iterator, Sequence

from holdfast.errors import NotFound
from holdfast.model import FUNCTION_DOMAIN, Attempt, Gate, Job, LaneState, Queue, Status, TaskStatus, Worker
from holdfast.store.database import Database
from holdfast.store.jobs import Jobs
from holdfast.store.lanes import Lanes
from holdfast.store.queues import Queues
from holdfast.store.tasks import Tasks
from holdfast.store.workers import Attempts, Workers
from holdfast.tasks import pipeline_of
from holdfast.views import Explanation, Reason


class Explain:
    def __init__(
        self,
        database: Database,
        jobs: Jobs,
        lanes: Lanes,
        queues: Queues,
        workers: Workers,
        attempts: Attempts,
        tasks: Tasks,
    ) -> None:
        self._database = database
        self._jobs = jobs
        self._lanes = lanes
        self._queues = queues
        self._workers = workers
        self._attempts = attempts
        self._tasks = tasks

    async def job(self, job_id: str, *, tenant: str = "default") -> Explanation:
        job = await self._jobs.get(job_id, tenant=tenant)
        if job.status in (Status.QUEUED, Status.PENDING):
            reasons = [*await self._gates(job), *await self._outside(job)]
        else:
            reasons = [await self._status(job), *await self._build(job)]
        return Explanation(id=job.id, status=job.status, reasons=tuple(reasons))

    async def _gates(self, job: Job) -> list[Reason]:
        """What the job itself waits for."""
        reasons = []
        if job.status is Status.PENDING:
            reasons.append(Reason(about="held", message="it was submitted with hold; release it"))
        if job.gate is Gate.UNRESOLVED:
            text = "its lane and needs have not been looked at yet; any worker or server does so within a second"
            reasons.append(Reason(about="unresolved", message=text))
        reasons += await self._needs(job)
        now = (await self._database.read("now"))[0]["now_at"]
        if job.available_at > now:
            what = f"attempt {job.attempt + 1} waits" if job.attempt else "not due"
            reasons.append(Reason(about="due", message=f"{what} until {job.available_at.isoformat()}"))
        if job.lane is not None and job.gate is not Gate.OPEN:
            reasons += await self._lane(job, job.lane)
        return reasons

    async def _needs(self, job: Job) -> list[Reason]:
        open_needs = [row["need_id"] for row in await self._database.read("open_needs", id=job.id)]
        if not open_needs:
            return []
        states = await self._database.read("need_states", tenant=job.tenant, ids=open_needs)
        known = {row["id"]: row["status"] for row in states}
        waits = [need for need in open_needs if known.get(need) != Status.SUCCEEDED]
        return [
            Reason(about="needs", message=f"needs job {need}, which is {known.get(need, 'deleted')}", jobs=(need,))
            for need in waits
        ]

    async def _lane(self, job: Job, name: str) -> list[Reason]:
        try:
            lane = await self._lanes.get(name, tenant=job.tenant)
        except NotFound:
            return []  # No resolver has been there yet.
        if lane.state is LaneState.PAUSED:
            return [Reason(about="lane", message=f"lane {name} is paused; resume it")]
        if lane.blockers:
            first = await self._jobs.get(lane.blockers[0], tenant=job.tenant)
            way_out = (
                "resume, resolve or cancel it" if first.status is Status.PAUSED else "resume, resolve or dismiss it"
            )
            text = f"lane {name} is blocked by job {first.id}, which is {first.status}; {way_out}"
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
        """What the queue and the workers say."""
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
        attempt = (await self._attempts.list(job.id, tenant=job.tenant))[-1]
        if job.lease is not None:
            text = f"it runs: attempt {job.attempt}, worker {job.lease.owner}"
            return Reason(about="status", message=text, workers=(job.lease.owner,))
        workers = [worker for worker in await self._workers.list() if worker.live]
        reach = [worker.worker for worker in workers if attempt.domain in (*worker.domains, FUNCTION_DOMAIN)]
        text = _orphaned(job, attempt, reach) + ("" if reach else _away(job, workers))
        return Reason(about="worker", message=text, workers=tuple(reach))

    async def _build(self, job: Job) -> list[Reason]:
        """Whose snapshot a pipeline waits for, that has a worker and runs no task."""
        pipeline = pipeline_of(job.spec)
        if pipeline is None or job.lease is None:
            return []
        left = [task for task in await self._tasks.of(job) if task.status is not TaskStatus.SUCCEEDED]
        wanted = next((task for task in left if pipeline.keeps(task.n)), None)
        if wanted is None or wanted.snapshot is None or left[0].status is not TaskStatus.PENDING:
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


def _orphaned(job: Job, attempt: Attempt, reach: Sequence[str]) -> str:
    text = f"its worker {attempt.worker} was lost; attempt {job.attempt} waits in {attempt.domain} to be adopted"
    return text + ("" if reach else f", and no live worker reaches {attempt.domain}: start one there")


def _away(job: Job, workers: Sequence[Worker]) -> str:
    """Who could, but for an engine that is away."""
    away = [f"{worker.worker}: {worker.away[job.capability]}" for worker in workers if job.capability in worker.away]
    return "".join(f"; {text}" for text in away)


def _workers(job: Job, workers: Sequence[Worker]) -> Iterator[Reason]:
    """Who could take it: nobody, nobody who knows how, or only those who have their hands full."""
    live = [worker for worker in workers if worker.live and not worker.draining]
    serving = [worker for worker in live if job.queue in worker.queues]
    able = [worker for worker in serving if job.capability in worker.capabilities]
    if not live:
        yield Reason(about="worker", message="no live worker: start one with `holdfast worker`")
    elif not serving:
        names = tuple(worker.worker for worker in live)
        yield Reason(about="worker", message=f"no live worker serves queue {job.queue}", workers=names)
    elif not able:
        names = tuple(worker.worker for worker in serving)
        text = f"no live worker of queue {job.queue} can run {job.capability}{_away(job, serving)}"
        yield Reason(about="worker", message=text, workers=names)
    elif all(len(worker.jobs) >= sum(worker.queues.values()) for worker in able):
        names = tuple(worker.worker for worker in able)
        yield Reason(about="worker", message=f"all slots are taken: {', '.join(names)}", workers=names)
