"""Operations killed after every statement: the record stays consistent, and the resolver finishes the rest."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.duties import orphan_settler
from holdfast.model import Claimable, Outcome, Status
from holdfast.store import Store, open_store
from holdfast.store.lanes import settle_lanes
from holdfast.store.postgres import PostgresDatabase, PostgresTx
from holdfast.store.sqlite import SqliteDatabase, SqliteTx
from tests.support.job_states import PROCESS

JOB = {"runner": "function", "spec": {"name": "f"}}
PAIR = [Claimable(queue="default", capability="function:f", domain="function")]
PROCESS_PAIR = [Claimable(queue="default", capability="process", domain="host-a")]
STEPS = 60

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.crash.test_crash"])


async def submit(store: Store, jobs: dict[str, str]) -> None:
    await store.jobs.submit_many([{**JOB, "lane": "L"}, {**JOB, "lane": "L", "needs": [jobs["first"]]}])


async def claim_and_fail(store: Store, jobs: dict[str, str]) -> None:
    (lease,) = (await store.leases.claim("w1", PAIR, slots=1, ttl=60)).claimed
    await store.leases.finish([(lease, Outcome.failed("exit_nonzero", "boom"))])


async def cancel(store: Store, jobs: dict[str, str]) -> None:
    await store.jobs.cancel(jobs["first"])


async def resume(store: Store, jobs: dict[str, str]) -> None:
    await store.jobs.resume(jobs["failed"])


async def resolve(store: Store, jobs: dict[str, str]) -> None:
    await store.jobs.resolve(jobs["failed"], {"by": "hand"})


async def dismiss(store: Store, jobs: dict[str, str]) -> None:
    await store.jobs.dismiss(jobs["failed"])


async def delete(store: Store, jobs: dict[str, str]) -> None:
    await store.jobs.delete(jobs["failed"])


async def pause_lane(store: Store, jobs: dict[str, str]) -> None:
    await store.lanes.pause("L")


async def strand(store: Store) -> None:
    """Add a job whose host cannot be reached, and another one after it in its lane."""
    await store.jobs.submit_many([{**PROCESS, "lane": "N", "on_lost": "fail"}, {**PROCESS, "lane": "N"}])
    await store.leases.claim("w1", PROCESS_PAIR, slots=1, ttl=60)
    await store.leases.orphan("w1")
    assert await orphan_settler.run_once(store, grace=0.0) == 1


async def recover(store: Store, jobs: dict[str, str]) -> None:
    assert len(await store.leases.recover(["host-a"])) == 1


async def give_up_host(store: Store, jobs: dict[str, str]) -> None:
    assert len((await store.workers.lost("host-a")).jobs) == 1


OPERATIONS: dict[str, Callable[[Store, dict[str, str]], Awaitable[None]]] = {
    work.__name__: work
    for work in (submit, claim_and_fail, cancel, resume, resolve, dismiss, delete, pause_lane, recover, give_up_host)
}


def die_after(step: int) -> None:
    """From now on, kill this process right after its n-th statement."""
    left = step

    def deadly(method: Any) -> Any:
        async def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            answer = await method(*args, **kwargs)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return counted

    for owner in (PostgresTx, SqliteTx, PostgresDatabase, SqliteDatabase):
        owner.rows = deadly(owner.rows)  # type: ignore[method-assign]
        owner.values = deadly(owner.values)  # type: ignore[method-assign]


def run_until_killed(url: str, operation: str, jobs: dict[str, str], step: int) -> None:
    """In a child: run an operation and die right after its n-th statement."""

    async def run() -> None:
        async with await open_store(url, listen=False) as store:
            die_after(step)
            await OPERATIONS[operation](store, jobs)

    asyncio.run(run())


async def scene(store: Store) -> dict[str, str]:
    """A lane with a blocker and waiting jobs, another with a head, and dependants of both."""
    (failed,) = await store.jobs.submit_many([{**JOB, "lane": "M"}])
    (lease,) = (await store.leases.claim("w0", PAIR, slots=1, ttl=60)).claimed
    await store.leases.finish([(lease, Outcome.failed("exit_nonzero", "boom"))])
    first, second, other_lane = await store.jobs.submit_many([{**JOB, "lane": lane} for lane in "LLM"])
    (child,) = await store.jobs.submit_many([{**JOB, "needs": [first]}])
    (grandchild,) = await store.jobs.submit_many([{**JOB, "needs": [child, second]}])
    return {
        "failed": failed,
        "first": first,
        "second": second,
        "other_lane": other_lane,
        "child": child,
        "grandchild": grandchild,
    }


async def assert_true_records(store: Store) -> None:
    for job in (await store.jobs.list(limit=1000)).items:
        events = (await store.events.page(job.id)).items
        assert [event.seq for event in events] == list(range(1, job.last_seq + 1))
        assert [event.data["status"] for event in events if event.type == "status"][-1] == job.status
        assert (job.finished_at is not None) == job.status.terminal
        assert (job.lease is None) or job.status is Status.RUNNING


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_operation_killed_at_any_statement_leaves_a_consistent_record(clean_url: str, operation: str) -> None:
    """Proves J2."""
    completed = False
    async with await open_store(clean_url, listen=False) as store:
        for step in range(1, STEPS):
            jobs = await scene(store)
            if operation in ("recover", "give_up_host"):
                await strand(store)
            child = context.Process(target=run_until_killed, args=(clean_url, operation, jobs, step))
            child.start()
            await asyncio.to_thread(child.join, 60)
            assert child.exitcode in (0, -signal.SIGKILL)
            await assert_true_records(store)
            await store.gates.resolve()
            await assert_true_records(store)
            assert list(await store.database.read("stuck_gates", limit=10)) == []
            await clear(store)
            if child.exitcode == 0:
                completed = True
                break
    assert completed
    assert step > 2


async def clear(store: Store) -> None:
    """Remove all jobs in the ordinary way, and resume the lanes."""
    for lane in await store.lanes.list():
        await store.lanes.resume(lane.lane)
    for job in (await store.jobs.list(limit=1000)).items:
        await store.jobs.delete(job.id, force=True)
    leases = (await store.leases.claim("w9", [], slots=0, ttl=60, domains=["function"])).adopted
    assert leases == []
    await store.leases.claim("w9", [], slots=0, ttl=60, domains=["host-a"])
    for job in (await store.jobs.list(limit=1000)).items:
        # Killed while it held a lease: the reaper's case, told by hand.
        assert job.lease is not None
        await finish_foreign(store, job.id, job.lease.token)
    await store.jobs.finish_deletions()
    assert (await store.jobs.list()).items == []


async def finish_foreign(store: Store, job_id: str, token: int) -> None:
    rows = [{"id": job_id, "token": token, "status": "cancelled", "cause": "cancelled", "delay": 0.0}]

    async def change(tx: Any) -> None:
        await tx.rows("finish", rows=rows)
        await settle_lanes(tx, [("default", lane) for lane in "LMN"])

    await store.database.transact(change)
    await store.gates.resolve()
