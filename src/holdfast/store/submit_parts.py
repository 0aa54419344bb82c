"""Accepting a large call in parts: the next one is checked while the database inserts the last one."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.store.database import Database, Row, Tx
from holdfast.submission import Batch, Submission, check_batch_size

PART = 1000

Jobs = Sequence[Submission | Mapping[str, Any]]


def divisible(jobs: Jobs, key: str | None) -> bool:
    """Return whether parts of a call may be checked apart: no job names another one or stands for it."""
    return len(jobs) > PART and key is None and not any(map(_names_a_job, jobs))


def _names_a_job(job: Any) -> bool:
    if isinstance(job, Submission):
        return job.id is not None or bool(job.needs) or job.reuse_key is not None
    return not isinstance(job, Mapping) or "id" in job or "needs" in job or "reuse_key" in job


async def submit_in_parts(
    database: Database, jobs: Jobs, build: Callable[[Jobs], Batch]
) -> tuple[Batch, Sequence[Row]]:
    """Accept a divisible call in one transaction, all or nothing; return the whole batch, and what `submit` returns."""
    check_batch_size(len(jobs))
    loop = asyncio.get_running_loop()
    parts = [jobs[n : n + PART] for n in range(0, len(jobs), PART)]
    built = [await asyncio.to_thread(build, parts[0])]

    async def work(tx: Tx) -> Sequence[Row]:
        existing: list[Row] = []
        for n in range(len(parts)):
            if len(built) > n + 1 or n + 1 == len(parts):  # The transaction is repeated, or this is the last part.
                existing += await tx.submit(built[n])
                continue
            ahead = loop.run_in_executor(None, build, parts[n + 1])
            try:
                existing += await tx.submit(built[n])
                built.append(await ahead)
            finally:
                ahead.cancel()
        return existing

    existing = await database.transact(work)
    whole = msgspec.structs.replace(
        built[0], jobs=[job for part in built for job in part.jobs], ids=[one for part in built for one in part.ids]
    )
    return whole, existing
