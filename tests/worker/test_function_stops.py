"""How functions are stopped: cancel, interrupt, timeouts, drain, and a worker that dies."""

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest

from holdfast.errors import StoreUnreachable
from holdfast.model import Cause, Job, Status, StopRequest
from holdfast.runner.function import Cancelled, Context
from holdfast.store.events import Events
from holdfast.worker.function_call import FunctionCall
from holdfast.worker.held_leases import HeldLease
from tests.support.in_process_workers import InProcessWorkers, eventually


async def test_cancel_and_interrupt_reach_a_function_through_its_token(workers: InProcessWorkers) -> None:
    """An async function that ignores it is cancelled after its grace. Proves C1, C4, R18."""
    seen = []

    @workers.functions.add
    async def polite(ctx: Context) -> None:
        await ctx.cancel.requested_async()
        seen.append(ctx.cancel.reason)
        raise Cancelled

    @workers.functions.add
    def blocking(ctx: Context) -> str:
        ctx.cancel.wait()
        return "returns all the same"

    @workers.functions.add
    async def deaf() -> None:
        await asyncio.sleep(3600)  # Reason: the job does not end by itself.

    jobs = [await workers.submit(name, stop_grace=0.2) for name in ("polite", "blocking", "deaf")]
    async with workers.worker():
        for job in jobs:
            await workers.running(job)
        await workers.store.jobs.interrupt(jobs[0].id)
        await workers.store.jobs.cancel(jobs[1].id)
        await workers.store.jobs.cancel(jobs[2].id)
        paused = await workers.ended(jobs[0], Status.PAUSED)
        await workers.ended(jobs[1], Status.CANCELLED)
        await workers.ended(jobs[2], Status.CANCELLED)
    assert seen == ["interrupt"]
    assert paused.error is not None
    assert paused.error.code == "interrupted"
    phases = [event.data["cancel"] for event in await workers.events(jobs[2], "cancel")]
    assert phases == ["requested", "signalled", "dead"]


async def test_a_sync_function_that_does_not_end_stays_running_until_it_returns(workers: InProcessWorkers) -> None:
    """Proves R23."""
    go = threading.Event()

    @workers.functions.add
    def stubborn() -> None:
        go.wait(60)

    job = await workers.submit("stubborn", stop_grace=0.1)
    async with workers.worker():
        await workers.running(job)
        await workers.store.jobs.cancel(job.id)

        async def not_dead() -> bool:
            return "not_dead" in [event.data["cancel"] for event in await workers.events(job, "cancel")]

        await eventually(not_dead, "it is told that it is not dead")
        assert (await workers.get(job)).status is Status.RUNNING
        go.set()
        await workers.ended(job, Status.CANCELLED)


async def test_timeouts_of_the_job_and_of_the_function(workers: InProcessWorkers) -> None:
    """Proves R9 for functions."""

    @workers.functions.add(timeout=0.2)
    async def bounded() -> None:
        await asyncio.sleep(3600)  # Reason: the job does not end by itself.

    @workers.functions.add
    async def silent(ctx: Context) -> None:
        for _ in range(3):
            ctx.log("something")
            await asyncio.sleep(0.8)  # Reason: shorter than the idle timeout, and longer all together.
        await asyncio.sleep(3600)  # Reason: the job does not end by itself.

    one = await workers.submit("bounded", stop_grace=0)
    two = await workers.submit("silent", stop_grace=0, idle_timeout=2)
    async with workers.worker():
        first = await workers.ended(one, Status.TIMED_OUT)
        second = await workers.ended(two, Status.TIMED_OUT)
    assert first.error is not None
    assert second.error is not None
    assert (first.error.code, second.error.code) == ("timed_out", "idle_timeout")
    assert len(await workers.log(two)) == 3


async def test_a_blocked_loop_keeps_its_leases(workers: InProcessWorkers) -> None:
    """An async function that blocks the worker's loop for longer than a lease lasts keeps it. Proves L8."""
    workers.set(lease_ttl=4.0, heartbeat_interval=0.5)

    @workers.functions.add
    async def rude() -> str:
        time.sleep(6.0)  # noqa: ASYNC251 Reason: longer than the lease, and the loop stands still.
        return "done"

    job = await workers.submit("rude")
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert ended.attempts == 1
    assert [event.data for event in await workers.events(job, "lease")] == []


async def test_draining_worker_finishes_short_functions_and_requeues_long_ones(
    workers: InProcessWorkers,
) -> None:
    """Proves C9, L13: what was drained does not count."""
    workers.set(drain_grace=3.0)
    leaving = asyncio.Event()

    @workers.functions.add
    async def short() -> str:
        await leaving.wait()
        return "ended"

    @workers.functions.add
    async def long() -> None:
        await asyncio.sleep(3600)  # Reason: the job does not end by itself.

    @workers.functions.add
    async def considerate(ctx: Context) -> None:
        await ctx.cancel.requested_async()
        ctx.cancel.check()

    jobs = {name: await workers.submit(name) for name in ("short", "long", "considerate")}
    async with workers.worker() as worker:
        for job in jobs.values():
            await workers.running(job)
        worker.drain()
        leaving.set()
    assert (await workers.get(jobs["short"])).result == "ended"
    for name in ("long", "considerate"):
        left = await workers.get(jobs[name])
        assert (left.status, left.attempts) == (Status.QUEUED, 0)
        (attempt,) = await workers.store.attempts.list(left.id)
        assert attempt.cause is Cause.DRAINED
        await workers.store.jobs.cancel(left.id)


async def test_log_of_a_function_is_kept_when_its_worker_drains_during_an_outage(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves C9, E3. The function has returned and the drain grace is over: its log is written first, then its end."""
    workers.set(drain_grace=0.1)
    append, give_up = Events.append, FunctionCall.give_up
    tried, given_up, back = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def away(self: Events, *args: Any, **fields: Any) -> Any:
        tried.set()
        if not back.is_set():
            raise StoreUnreachable("away")
        return await append(self, *args, **fields)

    def noted(self: FunctionCall) -> None:
        give_up(self)
        given_up.set()

    monkeypatch.setattr(Events, "append", away)
    monkeypatch.setattr(FunctionCall, "give_up", noted)

    @workers.functions.add
    async def talkative(ctx: Context) -> str:
        ctx.log("a line")
        return "ended"

    job = await workers.submit("talkative")
    async with workers.worker() as worker:
        await tried.wait()
        worker.drain()
        await given_up.wait()
        back.set()
    assert (await workers.get(job)).result == "ended"
    assert [event.data["lines"] for event in await workers.events(job, "log")] == [["a line"]]


async def test_orphaned_functions_are_settled_by_the_next_worker_as_on_lost_says(workers: InProcessWorkers) -> None:
    """Proves L11."""

    @workers.functions.add
    async def again(ctx: Context) -> int:
        return ctx.attempt

    ids = {}
    for on_lost, attempts in (("requeue", 2), ("requeue", 1), ("fail", 3), ("hold", 3)):
        job = await workers.submit("again", on_lost=on_lost, max_attempts=attempts, retry={"base": 0.01, "cap": 0.01})
        ids[on_lost, attempts] = job.id
    # A worker claims them all and dies without a word.
    pair = workers.functions.names
    assert pair == ["again"]
    from holdfast.model import FUNCTION_DOMAIN, Claimable  # noqa: PLC0415

    claimed = await workers.store.leases.claim(
        "dead", [Claimable(queue="default", capability="function:again", domain=FUNCTION_DOMAIN)], slots=9, ttl=0.01
    )
    assert len(claimed.claimed) == 4
    async with workers.worker():
        requeued = await workers.ended(ids["requeue", 2], Status.SUCCEEDED)
        spent = await workers.ended(ids["requeue", 1], Status.FAILED)
        failed = await workers.ended(ids["fail", 3], Status.FAILED)
        held = await workers.ended(ids["hold", 3], Status.PAUSED)
    assert (requeued.result, requeued.attempts) == (2, 2)
    for job in (spent, failed, held):
        assert job.error is not None
        assert (job.error.code, job.attempts) == ("lost", 1)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Until this event is set, the database accepts no events."""
    taken = asyncio.Event()
    append = Events.append

    async def later(*arguments: Any, **named: Any) -> Any:
        await taken.wait()
        return await append(*arguments, **named)

    monkeypatch.setattr(Events, "append", later)
    return taken


async def test_timeout_after_a_function_returned_is_ignored(workers: InProcessWorkers, slow: asyncio.Event) -> None:
    """Its timeout fires while the database is slow to store its last events."""

    @workers.functions.add(timeout=0.2)
    async def quick(ctx: Context) -> str:
        ctx.log("last line")
        return "done"

    job = await workers.submit("quick", stop_grace=0)
    async with workers.worker():
        await workers.running(job)
        await asyncio.sleep(0.6)  # Reason: past the timeout and its grace, which must not matter.
        slow.set()
        assert (await workers.ended(job, Status.SUCCEEDED)).result == "done"


async def test_stop_after_a_function_returned_keeps_its_log_and_result(
    workers: InProcessWorkers, slow: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves C1. There is nothing to stop: its events and its result are being written."""
    heard = asyncio.Event()
    hear = HeldLease.receive_stop

    def noted(self: HeldLease, stop: StopRequest | None) -> None:
        hear(self, stop)
        if stop is not None:
            heard.set()

    monkeypatch.setattr(HeldLease, "receive_stop", noted)

    @workers.functions.add
    async def quick(ctx: Context) -> str:
        ctx.log("last line")
        return "done"

    job = await workers.submit("quick", stop_grace=0)
    async with workers.worker():
        await workers.running(job)
        await workers.store.jobs.cancel(job.id)
        await heard.wait()
        await asyncio.sleep(0.1)  # Reason: past its grace, which must not matter.
        slow.set()
        assert (await workers.ended(job, Status.SUCCEEDED)).result == "done"
    assert await workers.log(job) == ["last line"]


async def test_function_that_ignores_cancellation_does_not_block_the_worker(workers: InProcessWorkers) -> None:
    """Proves C9."""
    workers.set(drain_grace=0.2)
    go = asyncio.Event()

    @workers.functions.add
    async def stubborn() -> None:
        while not go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go.wait()

    job = await workers.submit("stubborn")
    async with workers.worker() as worker:
        await workers.running(job)
    assert worker.stuck
    assert (await workers.get(job)).status is Status.QUEUED
    go.set()
    await asyncio.sleep(0)  # Reason: let the function return.
    await workers.store.jobs.cancel(job.id)


async def test_stop_request_may_escalate_while_the_function_ends(workers: InProcessWorkers) -> None:
    """Interrupt, then cancel: it is cancelled. Proves C1."""
    go = asyncio.Event()

    @workers.functions.add
    async def slow(ctx: Context) -> None:
        await ctx.cancel.requested_async()
        await go.wait()
        ctx.cancel.check()

    job = await workers.submit("slow", stop_grace=30)
    async with workers.worker():
        await workers.running(job)
        await workers.store.jobs.interrupt(job.id)
        await eventually(lambda: _reached_phase(workers, job, "signalled"), "it is asked to stop")
        await workers.store.jobs.cancel(job.id)
        await asyncio.sleep(0.5)  # Reason: the worker may hear of it first; it ends cancelled either way.
        go.set()
        await workers.ended(job, Status.CANCELLED)


async def _reached_phase(workers: InProcessWorkers, job: Job, phase: str) -> bool:
    return phase in [event.data["cancel"] for event in await workers.events(job, "cancel")]
