"""Direct mode: the queue is off, and a job runs in the request that submits it.

The `DirectExecutor` that runs the job is passed in. This module is the caller's side: fields that need a queue are
refused, the response is sent when the job ends, and a setting says whether a job continues when its client disconnects.
"""

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import Request

from holdfast.api.auth import Caller
from holdfast.config import OnDisconnect
from holdfast.errors import Conflict, Invalid, NotFound
from holdfast.model import Job
from holdfast.store import Store

WAITING = ("lane", "needs", "hold", "available_at", "queue_timeout")
"""Fields that make a job wait."""
WAIT = re.compile(r"(?:^|[,;\s])wait=(\d{1,9})(?:$|[,;\s])")
GONE = "its client went away"


class DirectRun(Protocol):
    """One job that a client waits for; `over` when it has ended, or this server no longer runs it."""

    job_id: str
    reused: bool
    over: asyncio.Event


class DirectExecutor(Protocol):
    on_disconnect: OnDisconnect

    async def submit(self, job: Mapping[str, Any], *, tenant: str, key: str | None, sent: Sequence[Any]) -> DirectRun:
        """Accept a job and start it, or refuse it at once."""

    def leave(self) -> None:
        """Accept no more jobs, and hand over the running ones."""


async def run_in_request(
    executor: DirectExecutor,
    store: Store,
    request: Request,
    who: Caller,
    job: Mapping[str, Any],
    *,
    sent: Sequence[Any],
) -> Job:
    """Run a job and return it when it ends; earlier if the caller prefers so or disconnects."""
    for field in WAITING:
        if job.get(field):
            raise Invalid(field, "needs the queue, which is off here (HOLDFAST_QUEUE_ENABLED)")
    wait = _wait(request)
    key = request.headers.get("idempotency-key")
    run = await executor.submit(job, tenant=who.tenant, key=key, sent=sent)
    if not await _ended(run, request, wait) and executor.on_disconnect == "cancel":
        with contextlib.suppress(Conflict, NotFound):  # The job ended meanwhile.
            await store.jobs.cancel(run.job_id, tenant=who.tenant, by=who.by, reason=GONE)
    found = await store.jobs.get(run.job_id, tenant=who.tenant)
    return msgspec.structs.replace(found, reused=run.reused)


async def _ended(run: DirectRun, request: Request, wait: float | None) -> bool:
    """Wait for the end, at most `wait` seconds; return False if the client disconnects first."""
    over, gone = (asyncio.ensure_future(work) for work in (run.over.wait(), _disconnected(request)))
    try:
        await asyncio.wait([over, gone], timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        return over.done() or not gone.done()
    finally:
        over.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _wait(request: Request) -> float | None:
    """Return how long the caller prefers to wait (`Prefer: wait=10`, RFC 7240); None means until the end."""
    preference = WAIT.search(request.headers.get("prefer", ""))
    return None if preference is None else float(preference.group(1))
