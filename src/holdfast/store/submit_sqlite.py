"""Accept a batch on SQLite: idempotency, reuse, depth, needs, insert; one transaction, the caller's or the writer's.

On Postgres the same is in the SQL function `accept_jobs` (sql/repeatable/postgres/submit.sql), which callers in any
language reach through `holdfast_submit`. One table of cases (tests/support/submit_cases.py) runs against both.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast import decoding
from holdfast.errors import Conflict, NeedFailed, QueueFull, ReplayedJobDeleted
from holdfast.model import BROKEN, FUNCTION, Status
from holdfast.store.database import Row, json_text
from holdfast.store.error_mapping import need_unknown
from holdfast.store.rows import to_functions
from holdfast.submission import QUEUE, Batch, Submission, complete

RunStatement = Callable[..., Sequence[Row]]


def submit_batch(run: RunStatement, batch: Batch) -> Sequence[Row]:
    """Write a batch and return the jobs that exist already, as the SQL function does."""
    if batch.key is not None:
        used = run("find_idempotency_key", tenant=batch.tenant, key=batch.key)
        if used:
            return _replay(run, batch, used[0])
    batch = _with_defaults(run, batch)
    joined = _join(run, batch.jobs)
    jobs = [_with_needs(job, joined) for job in batch.jobs if job.id not in joined]
    _refuse_overflow(run, jobs)
    _refuse_needs(run, batch)
    if batch.key is not None:
        ids = json_text([joined.get(str(job.id), job.id) for job in batch.jobs])
        run("store_idempotency_key", tenant=batch.tenant, key=batch.key, body=batch.body, jobs=ids)
    run("submit", jobs=jobs, labels=_labels(jobs), ids=[job.id for job in jobs])
    limited = {row["queue"] for row in run("limited_queues")}
    if limited:
        run("set_limited", ids=[job.id for job in jobs if job.queue in limited])
    return [{"id": reusable_id, "asked": own} for own, reusable_id in joined.items()]


def _with_defaults(run: RunStatement, batch: Batch) -> Batch:
    """Fill in fields that the jobs leave out: from the defaults of their functions, else from the caller's settings."""
    functions = any(job.runner == FUNCTION for job in batch.jobs)
    return complete(batch, to_functions(run("function_defaults")) if functions else {})


def _labels(jobs: Sequence[Submission]) -> list[dict[str, str | None]]:
    return [
        {"tenant": job.tenant, "label": f"{name}={value}", "id": job.id}
        for job in jobs
        for name, value in job.labels.items()
    ]


def _replay(run: RunStatement, batch: Batch, used: Row) -> Sequence[Row]:
    if used["body"] != batch.body:
        raise Conflict(f"idempotency key {batch.key} was used with another body")
    ids: list[str] = decoding.decode(used["jobs"], list[str])
    existing = {row["id"] for row in run("need_states", tenant=batch.tenant, ids=ids)}
    if not existing.issuperset(ids):
        raise ReplayedJobDeleted(f"what idempotency key {batch.key} made was deleted")
    return [{"id": job_id, "asked": None} for job_id in ids]


def _join(run: RunStatement, jobs: Sequence[Submission]) -> dict[str, str]:
    """Return which of these jobs have a reuse key that another job already has, with that job."""
    joined: dict[str, str] = {}
    own_keys: dict[str, str] = {}
    for job in jobs:
        if job.reuse_key is None:
            continue
        reusable_id = own_keys.get(job.reuse_key)
        if reusable_id is None:
            rows = run("find_reusable", tenant=job.tenant, reuse_key=job.reuse_key, rebuild=job.rebuild)
            reusable_id = rows[0]["job_id"] if rows else None
        if reusable_id is not None:
            joined[str(job.id)] = reusable_id
        else:
            own_keys[job.reuse_key] = str(job.id)
            run("set_reuse_key", tenant=job.tenant, reuse_key=job.reuse_key, id=job.id)
    return joined


def _refuse_needs(run: RunStatement, batch: Batch) -> None:
    outside = sorted({need for job in batch.jobs for need in job.needs}.difference(batch.ids))
    if not outside:
        return
    statuses = {row["id"]: Status(row["status"]) for row in run("need_states", tenant=batch.tenant, ids=outside)}
    for need in outside:
        if need not in statuses:
            raise need_unknown(need)
        if statuses[need] in BROKEN:
            raise NeedFailed(need, statuses[need])


def _with_needs(job: Submission, joined: Mapping[str, str]) -> Submission:
    if not joined or not job.needs:
        return job
    return msgspec.structs.replace(job, needs=tuple(joined.get(need, need) for need in job.needs))


def _refuse_overflow(run: RunStatement, jobs: Sequence[Submission]) -> None:
    limits: dict[str, Any] = {row["queue"]: row["depth_limit"] for row in run("limited_queues")}
    if not limits:
        return
    for queue, added in Counter(job.queue or QUEUE for job in jobs).items():
        limit = limits.get(queue)
        if limit is None:
            continue
        (row,) = run("waiting_in_queue", queue=queue, limit=limit)
        if row["waiting"] + added > limit:
            raise QueueFull(f"queue {queue} is full: at most {limit} jobs may wait in it")
