"""Jobs: submit, read, list, stop, resume, resolve, dismiss, release, delete."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from holdfast.api.direct import run_in_request
from holdfast.api.dry_run import plan_job, refuse_bad_sources
from holdfast.api.json_body import in_thread_if_large
from holdfast.api.request_types import (
    AttemptList,
    BulkRequest,
    CallerReason,
    DeletedJob,
    DeleteJob,
    EmptyBody,
    JobIds,
    JobList,
    JobRequest,
    ListJobs,
    ResolveJob,
    ResumeJob,
    TaskList,
)
from holdfast.api.routing import Call, Reply, Routes
from holdfast.api.uploads import with_uploads
from holdfast.errors import FieldForbidden, Forbidden, Invalid, QueueOff
from holdfast.model import Job, Role, TaskRecord
from holdfast.privileges import refuse_privileged, refuse_raw, refuse_root
from holdfast.registry import runners
from holdfast.response_types import Explanation, JobView, Links, PlanView
from holdfast.response_types import Reason as WhyNot
from holdfast.runner.disk import DATABASE
from holdfast.runner_specs import check_spec
from holdfast.store.jobs import Stopped
from holdfast.submission import FIRST_YEAR, LAST_YEAR, Submission, check, check_batch_size, parse

routes = Routes()
ONE = {200: JobView}
STOP = {200: JobView, 202: JobView}
CHECK = "a readiness check is a command: it needs an admin's token or HOLDFAST_ALLOW_RAW; use a tool that has one"
JOB_BYTES = 1024
"""The assumed size of a job in a bulk, to decide whether the bulk is processed in a thread."""
SECRETS = "secrets are named by tools, or by an admin"


@routes.add("POST", "/v1/jobs", role=Role.SUBMITTER, answers={201: JobView, 200: (JobView, PlanView)}, shape=JobRequest)
async def submit(call: Call, body: dict[str, Any]) -> Reply:
    """Submit a job. 201 once it is in the database; 200 with `reused` if it existed already.

    Where the queue is off, the job runs in this request: the answer comes when it ends, or 503 `at_capacity` at once.
    With `plan_only`, return what a pipeline would do, and submit nothing.
    """
    plan_only = body.get("plan_only", False)
    if not isinstance(plan_only, bool):
        raise Invalid("plan_only", "must be true or false")
    asked = await _prepared(call, _allowed(call, body))
    await call.service.readiness.require_room(DATABASE)
    if plan_only:
        return Reply(await _planned(call, check(parse(asked), call.tenant)))
    if call.service.direct is not None:
        job = await run_in_request(call.service.direct, call.store, call.request, call.who, asked, sent=[body])
    else:
        job = await call.store.jobs.submit(asked, tenant=call.tenant, key=_key(call), sent=[body])
    (view,) = await _views(call, [job])
    return Reply(view, 200 if job.reused else 201, {"Location": view.links.self})


@routes.add("POST", "/v1/jobs/bulk", role=Role.SUBMITTER, answers={201: JobIds, 200: JobIds}, shape=BulkRequest)
async def submit_bulk(call: Call, body: dict[str, Any]) -> Reply:
    """Submit many jobs, all or none; 200 if every one existed already."""
    for name in body:
        if name != "jobs":
            raise Invalid(name[:60], "unknown field; a bulk has `jobs`")
    if call.service.direct is not None:
        raise QueueOff("jobs run in the request that submits them: submit them one by one")
    jobs = body.get("jobs")
    if not isinstance(jobs, list):
        raise Invalid("jobs", "must be a list of jobs")
    check_batch_size(len(jobs))
    await call.service.readiness.require_room(DATABASE)
    allowed = await in_thread_if_large(len(jobs) * JOB_BYTES, lambda: _all_allowed(call, jobs))
    for n, job in enumerate(allowed):
        if job.get("uploads") or job.get("tasks"):
            with _with_job_index(n):
                allowed[n] = await _prepared(call, job)
    try:
        accepted = await call.store.jobs.accept(allowed, tenant=call.tenant, key=_key(call), sent=jobs)
    except Invalid:
        await asyncio.to_thread(_raise_first_problem, allowed, call.tenant)
        raise
    return Reply(JobIds(ids=[job.id for job in accepted]), 200 if all(job.reused for job in accepted) else 201)


@routes.add("GET", "/v1/jobs", role=Role.VIEWER, answers={200: JobList})
async def list_jobs(call: Call, query: ListJobs) -> Reply:
    """List jobs, newest first; or those whose ids begin or end with `id`."""
    if query.id is not None:
        found = await call.store.jobs.with_id_part(query.id, tenant=call.tenant, limit=query.limit)
        return Reply(JobList(items=await _views(call, found), next_cursor=None))
    for name, at in (("since", query.since), ("until", query.until)):
        if at is not None and not FIRST_YEAR <= at.year <= LAST_YEAR:
            raise Invalid(name, f"is not between the years {FIRST_YEAR} and {LAST_YEAR}")
    page = await call.store.jobs.list(
        tenant=call.tenant,
        status=query.status,
        kind=query.kind,
        queue=query.queue,
        lane=query.lane,
        labels=dict(_label(text) for text in query.label),
        since=query.since,
        until=query.until,
        limit=query.limit,
        cursor=query.cursor,
    )
    return Reply(JobList(items=await _views(call, page.items), next_cursor=page.next_cursor))


@routes.add("GET", "/v1/jobs/{job_id}", role=Role.VIEWER, answers=ONE)
async def get_job(call: Call, job_id: str) -> Reply:
    """Read a job."""
    return await _one(call, await call.store.jobs.get(job_id, tenant=call.tenant))


@routes.add("GET", "/v1/jobs/{job_id}/attempts", role=Role.VIEWER, answers={200: AttemptList})
async def list_attempts(call: Call, job_id: str) -> Reply:
    """Read every attempt of a job, the open one last."""
    return Reply(AttemptList(items=await call.store.attempts.list(job_id, tenant=call.tenant)))


@routes.add("GET", "/v1/jobs/{job_id}/tasks", role=Role.VIEWER, answers={200: TaskList})
async def list_tasks(call: Call, job_id: str) -> Reply:
    """Read the tasks of a pipeline, in order."""
    return Reply(TaskList(items=await call.store.tasks.list(job_id, tenant=call.tenant)))


@routes.add("GET", "/v1/jobs/{job_id}/explain", role=Role.VIEWER, answers={200: Explanation})
async def explain(call: Call, job_id: str) -> Reply:
    """Say why a job is not running, and which tasks of a pipeline would run."""
    why = await call.store.explain.job(job_id, tenant=call.tenant)
    job = await call.store.jobs.get(job_id, tenant=call.tenant)
    if "tasks" not in job.spec or job.status.terminal:
        return Reply(why)
    try:
        check_spec(job.runner, job.spec)
        return Reply(msgspec.structs.replace(why, plan=await _planned(call, job)))
    except Invalid as error:
        reason = WhyNot(about="plan", message=f"it cannot be planned now: {error.message}")
        return Reply(msgspec.structs.replace(why, reasons=(*why.reasons, reason)))


@routes.add("POST", "/v1/jobs/{job_id}/cancel", role=Role.SUBMITTER, answers=STOP)
async def cancel(call: Call, job_id: str, body: CallerReason) -> Reply:
    """Cancel a job: 202 while it is being stopped, 200 when it has ended."""
    return await _stopped(
        call, await call.store.jobs.cancel(job_id, tenant=call.tenant, by=call.who.actor, reason=body.reason)
    )


@routes.add("POST", "/v1/jobs/{job_id}/interrupt", role=Role.OPERATOR, answers=STOP)
async def interrupt(call: Call, job_id: str, body: CallerReason) -> Reply:
    """Stop a running job so that it pauses; a waiting one is cancelled."""
    return await _stopped(
        call, await call.store.jobs.interrupt(job_id, tenant=call.tenant, by=call.who.actor, reason=body.reason)
    )


@routes.add("POST", "/v1/jobs/{job_id}/resume", role=Role.OPERATOR, answers=ONE)
async def resume(call: Call, job_id: str, body: ResumeJob) -> Reply:
    """Queue a job again that paused, failed, timed out or was cancelled."""
    job = await call.store.jobs.resume(
        job_id,
        tenant=call.tenant,
        by=call.who.actor,
        reason=body.reason,
        budget=body.budget,
        stopped=body.stopped,
    )
    return await _one(call, job)


@routes.add("POST", "/v1/jobs/{job_id}/resolve", role=Role.OPERATOR, answers=ONE)
async def resolve(call: Call, job_id: str, body: ResolveJob) -> Reply:
    """Mark a paused, failed or timed-out job as succeeded, with the result that a person gives."""
    job = await call.store.jobs.resolve(job_id, body.result, tenant=call.tenant, by=call.who.actor, reason=body.reason)
    return await _one(call, job)


@routes.add("POST", "/v1/jobs/{job_id}/dismiss", role=Role.OPERATOR, answers=ONE)
async def dismiss(call: Call, job_id: str, body: CallerReason) -> Reply:
    """Let the lane of a failed or timed-out job continue without it."""
    return await _one(
        call, await call.store.jobs.dismiss(job_id, tenant=call.tenant, by=call.who.actor, reason=body.reason)
    )


@routes.add("POST", "/v1/jobs/{job_id}/release", role=Role.SUBMITTER, answers=ONE)
async def release(call: Call, job_id: str, body: EmptyBody) -> Reply:
    """Queue a job that was submitted with `hold`."""
    return await _one(call, await call.store.jobs.release(job_id, tenant=call.tenant, by=call.who.actor))


@routes.add("DELETE", "/v1/jobs/{job_id}", role=Role.OPERATOR, answers={200: DeletedJob, 202: DeletedJob})
async def delete(call: Call, job_id: str, query: DeleteJob) -> Reply:
    """Delete a job that has ended; with `force`, stop it first (202 `deleting`)."""
    done = await call.store.jobs.delete(
        job_id, tenant=call.tenant, force=query.force, dry_run=query.dry_run, by=call.who.actor, reason=query.reason
    )
    return Reply(DeletedJob(outcome=done.outcome), 202 if done.outcome == "deleting" else 200)


def _all_allowed(call: Call, jobs: Sequence[Any]) -> list[Mapping[str, Any]]:
    allowed = []
    for n, job in enumerate(jobs):
        with _with_job_index(n):
            allowed.append(_allowed(call, job, f"jobs[{n}]"))
    return allowed


def _raise_first_problem(jobs: Sequence[Mapping[str, Any]], tenant: str) -> None:
    """Raise the error of the first invalid job, with its position."""
    for n, job in enumerate(jobs):
        with _with_job_index(n):
            check(parse(job), tenant)


def _allowed(call: Call, job: Any, where: str = "job") -> Mapping[str, Any]:
    """Return the job as the store takes it, if this caller may submit it."""
    if not isinstance(job, dict):
        raise Invalid(where, "must be a JSON object")
    settings = call.service.settings
    if job.get("tool") is not None:
        job = call.service.tools.expand(job)
    elif not call.who.admin:
        if not settings.allow_raw:
            refuse_raw(job.get("runner"))
        if job.get("check") is not None and not settings.allow_raw:
            raise Forbidden(CHECK)
        if job.get("secrets"):
            raise Forbidden(SECRETS)
        refuse_privileged(job.get("runner"), job.get("spec"), settings.ceilings)
    if not settings.allow_root_jobs:
        refuse_root(job.get("spec"))
    return _within_ceilings(call, {name: value for name, value in job.items() if name not in ("tool", "plan_only")})


def _within_ceilings(call: Call, job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse limits that a worker with the same settings would refuse at the start."""
    descriptor = runners().get(str(job.get("runner")))
    if descriptor is not None and descriptor.limits and isinstance(spec := job.get("spec"), dict):
        call.service.settings.attempt_limits.of(spec, descriptor.limits)
    return job


async def _prepared(call: Call, job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a job with its uploads assigned; for a pipeline, also with its base resolved and its files checked."""
    job = await with_uploads(job, call.tenant, call.service.settings, call.service.artifacts)
    if not job.get("tasks"):
        return job
    if isinstance(job.get("base"), str):
        base = await call.store.snapshots.get(job["base"], tenant=call.tenant)
        await call.store.snapshots.use([base.id], tenant=call.tenant)
        job = {**job, "base": base.id}
    spec = check(parse(job), call.tenant).spec
    await refuse_bad_sources(spec, call.service.settings.shared, call.tenant)
    return job


async def _planned(call: Call, job: Job | Submission) -> PlanView:
    service = call.service
    shared, secrets = service.settings.shared, job.policy.secrets if isinstance(job, Job) else job.secrets
    return await plan_job(call.store, job.spec, job.inputs, shared, service.facts, call.tenant, secrets)


@contextmanager
def _with_job_index(n: int) -> Iterator[None]:
    """Add the position in the bulk to every error about the nth job."""
    try:
        yield
    except (Invalid, FieldForbidden) as error:
        text = error.message.removeprefix(f"{error.field}: ")
        where = error.field if error.field.startswith("jobs[") else f"jobs[{n}].{error.field}"
        raise type(error)(where, text) from None


def _key(call: Call) -> str | None:
    return call.request.headers.get("idempotency-key")


def _label(text: str) -> tuple[str, str]:
    key, colon, value = text.partition(":")
    if not colon or not key:
        raise Invalid("label", f"{text[:60]!r} is not key:value")
    return key, value


async def _views(call: Call, jobs: Sequence[Job]) -> list[JobView]:
    """Return jobs as callers see them, each with its tasks: the same in a list as alone."""
    tasks = await call.store.tasks.of_all(jobs)
    return [_view(call, job, tasks.get(job.id, ())) for job in jobs]


def _view(call: Call, job: Job, tasks: Sequence[TaskRecord]) -> JobView:
    here = f"{call.root}/v1/jobs/{job.id}"
    links = Links(self=here, events=f"{here}/events", stream=f"{here}/events/stream", artifacts=f"{here}/artifacts")
    return JobView(**msgspec.structs.asdict(job), links=links, tasks=tasks)


async def _one(call: Call, job: Job, status: int = 200) -> Reply:
    (view,) = await _views(call, [job])
    return Reply(view, status)


async def _stopped(call: Call, stopped: Stopped) -> Reply:
    return await _one(call, stopped.job, 202 if stopped.outcome == "stopping" else 200)
