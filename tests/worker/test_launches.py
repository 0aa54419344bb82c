"""Between a claim's answer and the start of its functions the next claim is sent; drain, stop and loss are heard."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from holdfast.model import Error, Lease, Status
from holdfast.runner.function import Context
from holdfast.store.leases import Claimed, Leases
from holdfast.worker.functions import FunctionExecutor
from holdfast.worker.held_leases import HeldLease
from holdfast.worker.worker import Worker
from tests.support.in_process_workers import InProcessWorkers


async def test_next_claim_is_sent_before_the_functions_of_the_last_one_are_launched(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    claim, launch = Leases.claim, FunctionExecutor.launch

    async def noted_claim(self: Leases, *args: Any, **more: Any) -> Claimed:
        if more["slots"]:
            order.append("claim")
        return await claim(self, *args, **more)

    def noted_launch(self: FunctionExecutor, held: HeldLease) -> None:
        order.append("launch")
        launch(self, held)

    @workers.functions.add
    async def noop() -> None:
        pass

    monkeypatch.setattr(Leases, "claim", noted_claim)
    monkeypatch.setattr(FunctionExecutor, "launch", noted_launch)
    monkeypatch.setattr("holdfast.worker.worker.CLAIM", 1)
    jobs = [await workers.submit("noop") for _ in range(20)]
    async with workers.worker({"default": 20}):
        await workers.ended(jobs[-1], Status.SUCCEEDED)
    # Not every time: between two claims the worker may look for orphans.
    assert ("claim", "claim", "launch") in zip(order, order[1:], order[2:], strict=False)


async def test_a_drain_between_claim_and_start_reaches_the_function(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.set(drain_grace=60.0)
    claim = Leases.claim
    running: list[Worker] = []

    async def claim_and_drain(self: Leases, *args: Any, **more: Any) -> Claimed:
        claimed = await claim(self, *args, **more)
        if claimed.claimed:
            running[0].drain()
        return claimed

    @workers.functions.add
    async def patient(ctx: Context) -> str | None:
        await ctx.cancel.requested_async()
        return ctx.cancel.reason

    monkeypatch.setattr(Leases, "claim", claim_and_drain)
    async with workers.worker() as worker:
        running.append(worker)
        job = await workers.submit("patient")
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert ended.result == "drain"


async def test_a_stop_request_between_claim_and_start_reaches_the_function(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poll for stop requests is off: what is heard before the start must not be forgotten."""
    workers.set(poll_interval=300.0, heartbeat_interval=300.0, lease_ttl=900.0)
    monkeypatch.setattr("holdfast.worker.worker.jitter", lambda seconds: 300.0)
    launch = FunctionExecutor.launch

    def late_launch(self: FunctionExecutor, held: HeldLease) -> None:
        async def stop_and_launch() -> None:
            await self.services.store.jobs.cancel(held.lease.id)
            held.receive_stop((await self.services.store.leases.stop_requests(self.services.worker))[held.lease.id])
            launch(self, held)

        waiting.append(asyncio.create_task(stop_and_launch()))

    @workers.functions.add
    async def patient(ctx: Context) -> None:
        await ctx.cancel.requested_async()

    waiting: list[asyncio.Task[None]] = []
    monkeypatch.setattr(FunctionExecutor, "launch", late_launch)
    job = await workers.submit("patient")
    async with workers.worker():
        await workers.ended(job, Status.CANCELLED)


async def test_a_function_whose_lease_was_lost_before_it_began_does_not_run(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    lost: list[HeldLease] = []
    launch = FunctionExecutor.launch

    def launch_lost(self: FunctionExecutor, held: HeldLease) -> None:
        if not lost:
            held.lose()
            lost.append(held)
        launch(self, held)

    @workers.functions.add
    async def noted() -> None:
        begun.append(1)

    monkeypatch.setattr(FunctionExecutor, "launch", launch_lost)
    job = await workers.submit("noted", max_attempts=2)
    async with workers.worker():
        assert (await workers.ended(job, Status.SUCCEEDED)).attempt == 2
    assert begun == [1]


async def test_a_job_that_cannot_be_launched_fails_alone(workers: InProcessWorkers) -> None:
    def fail(step: str, lease: Lease) -> None:
        if step == "launching" and lease.id == jobs[1].id:
            raise RuntimeError("a fault at its launch")

    @workers.functions.add
    async def noop() -> None:
        pass

    jobs = [await workers.submit("noop") for _ in range(3)]
    async with workers.worker({"default": 3}, at=fail):
        await workers.ended(jobs[0], Status.SUCCEEDED)
        failed = await workers.ended(jobs[1], Status.FAILED)
        await workers.ended(jobs[2], Status.SUCCEEDED)
    assert failed.error == Error(code="internal", message="the worker could not launch it: a fault at its launch")


async def test_a_finished_function_leaves_nothing_for_the_garbage_collector(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[weakref.ref[HeldLease]] = []
    launch = FunctionExecutor.launch

    class Watched(HeldLease):
        __slots__ = ("__weakref__",)

    def noted_launch(self: FunctionExecutor, held: HeldLease) -> None:
        calls.append(weakref.ref(held))
        launch(self, held)

    @workers.functions.add
    async def noop() -> None:
        pass

    monkeypatch.setattr("holdfast.worker.held_leases.HeldLease", Watched)
    monkeypatch.setattr(FunctionExecutor, "launch", noted_launch)
    job = await workers.submit("noop")
    gc.collect()
    gc.disable()
    try:
        async with workers.worker():
            await workers.ended(job, Status.SUCCEEDED)
        assert [call() for call in calls] == [None]
    finally:
        gc.enable()
