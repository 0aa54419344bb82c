"""How a stop request reaches the worker that holds the job: by a wake-up or by a poll, not by its next heartbeat.

The heartbeat interval is longer than any test waits, and one of the two ways is disabled, so that the other one must
have stopped the job. `pytest --junit-xml` reports the seconds that it took.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.config import Settings
from holdfast.model import HeartbeatReply, Job, Status
from holdfast.runner.function import Context
from holdfast.store.leases import Leases
from holdfast.worker.worker import Worker
from tests.support.in_process_workers import PATIENCE, InProcessWorkers

INTERVAL = 2 * PATIENCE


async def never(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def beats(workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The heartbeats that were sent, by worker; a worker sends one when it starts, and the next one much later."""
    sent: list[str] = []
    beat = Leases.beat

    async def counted(self: Leases, worker: str, *more: Any, **named: Any) -> HeartbeatReply:
        sent.append(worker)
        return await beat(self, worker, *more, **named)

    monkeypatch.setattr(Leases, "beat", counted)
    workers.set(lease_ttl=3 * INTERVAL, heartbeat_interval=INTERVAL, poll_interval=Settings.poll_interval)
    return sent


@pytest.mark.parametrize(("verb", "status"), [("cancel", Status.CANCELLED), ("interrupt", Status.PAUSED)])
@pytest.mark.parametrize(("way", "other"), [("wake-up", "_poll_stops"), ("poll", "_listen")])
async def test_stop_request_is_heard_before_the_next_heartbeat(
    workers: InProcessWorkers,
    beats: list[str],
    verb: str,
    status: Status,
    way: str,
    other: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Proves C1: a wake-up alone is enough, and so is the poll alone, for processes and for functions."""
    monkeypatch.setattr(Worker, other, never)

    @workers.functions.add
    async def nap(ctx: Context) -> None:
        ctx.log("begun")
        await asyncio.sleep(3600)  # Reason: the job does not end by itself.

    async with workers.worker():
        for name, job in {
            "process": await workers.sh("echo begun; exec sleep 3600"),
            "function": await workers.submit("nap", stop_grace=0.1),
        }.items():
            await workers.wait_for_log(job, "begun")
            before = len(beats)
            await getattr(workers.store.jobs, verb)(job.id)
            await workers.ended(job, status)
            assert len(beats) == before == 1, "no heartbeat brought it"
            seconds = await heard_after(workers, job)
            record_property(f"{verb} of a {name} by {way} alone", seconds)


async def heard_after(workers: InProcessWorkers, job: Job) -> float:
    """Seconds from the request to the first signal, by the job's own events."""
    at = {event.data["cancel"]: event.at for event in await workers.events(job, "cancel")}
    return (at["signalled"] - at["requested"]).total_seconds()
