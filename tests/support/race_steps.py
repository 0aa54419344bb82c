"""The steps that race scripts are made of: submit, claim, wait for a moment or for another process."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from holdfast.model import FUNCTION_DOMAIN, Cause, Claimable, Lease, Outcome, Status, new_id
from holdfast.store import Store

LONG = 60.0
UNTIL_SECONDS = 60.0
"""How long a process waits for what another one does, also on a busy machine."""
PAIR = Claimable(queue="default", capability="function:f", domain=FUNCTION_DOMAIN)
LIVE = (Status.PENDING, Status.QUEUED, Status.RUNNING)


def function(**fields: Any) -> dict[str, Any]:
    return {"runner": "function", "spec": {"name": "f"}, **fields}


def worker_name() -> str:
    return f"w-{os.getpid()}-{new_id()[-6:]}"


async def claim(
    store: Store, worker: str, slots: int, *, ttl: float = LONG, adopting: bool = False
) -> tuple[Sequence[Lease], Sequence[Lease]]:
    """Adopted and claimed leases."""
    domains = [FUNCTION_DOMAIN] if adopting else []
    taken = await store.leases.claim(worker, [PAIR], slots=slots, ttl=ttl, domains=domains)
    return taken.adopted, taken.claimed


async def at(moment: float) -> None:
    """Wait for a moment of the clock that all processes of this machine share."""
    # Reason: the racers of a round aim at the same moment; nothing depends on their hitting it.
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


async def until(store: Store, job_id: str, reached: Callable[[Status], bool], *, ran: bool = False) -> None:
    """Wait for what another process does to a job; with `ran`, an attempt that has come and gone will do too."""
    deadline = time.monotonic() + UNTIL_SECONDS
    while time.monotonic() < deadline:
        job = await store.jobs.get(job_id)
        if reached(job.status) or (ran and job.attempt > 0):
            return
        await asyncio.sleep(0.005)  # Reason: polling what another process does.
    raise TimeoutError(f"job {job_id} did not get there")


async def anything_live(store: Store) -> bool:
    return bool((await store.jobs.list(status=LIVE, limit=1)).items)


@asynccontextmanager
async def announcing(flag: Path) -> AsyncIterator[None]:
    """Create a file when done, for workers that wait for more jobs."""
    try:
        yield
    finally:
        os.close(os.open(flag, os.O_CREAT | os.O_WRONLY))


def outcome_of(lease: Lease) -> Outcome:
    """What the job itself asks for: `ends` lists how its attempts end; the last one holds for all further ones."""
    ends: Sequence[str] = lease.inputs.get("ends", ["succeed"])
    match ends[min(lease.attempt, len(ends)) - 1]:
        case "succeed":
            return Outcome.succeeded({"attempt": lease.attempt})
        case "retry":
            return Outcome.requeued(Cause.EXIT)
        case "retry_later":
            return Outcome.requeued(Cause.EXIT, delay=0.002)
        case _:
            return Outcome.failed("exit_nonzero", "boom", exit_code=1)
