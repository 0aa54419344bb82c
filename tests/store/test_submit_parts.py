"""A large call is inserted in parts on Postgres, and is still accepted whole or not at all."""

import asyncio
import signal
import sys
from typing import Any

import asyncpg
import pytest

from holdfast.errors import Invalid, QueueFull
from holdfast.store import submit_parts
from holdfast.store.postgres import PostgresTx
from tests.support.store_harness import StoreHarness

FUNCTION: dict[str, Any] = {"runner": "function", "spec": {"name": "f"}}
COUNT = 25
KILLED = """
import asyncio, os, signal, sys
from holdfast.store import open_store, submit_parts
from holdfast.store.postgres import PostgresTx
submit_parts.PART = 10
submit, sent = PostgresTx.submit, []

async def submit_and_die(self, batch):
    rows = await submit(self, batch)
    sent.append(len(batch.jobs))
    print(len(batch.jobs), flush=True)
    if len(sent) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rows

async def main():
    PostgresTx.submit = submit_and_die
    async with await open_store(sys.argv[1], listen=False) as store:
        await store.jobs.submit_many([{"runner": "function", "spec": {"name": "f"}}] * 25)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_parts, "PART", 10)


async def count(harness: StoreHarness) -> int:
    return len((await harness.store.jobs.list()).items)


async def test_ids_of_a_divided_call_are_in_the_order_given(harness: StoreHarness) -> None:
    ids = await harness.store.jobs.submit_many([{**FUNCTION, "inputs": {"n": n}} for n in range(COUNT)])
    assert [(await harness.get(one)).inputs for one in ids] == [{"n": n} for n in range(COUNT)]
    assert await count(harness) == COUNT


async def test_invalid_job_in_any_part_refuses_the_whole_call(harness: StoreHarness) -> None:
    for wrong in (0, 9, 10, COUNT - 1):
        jobs = [FUNCTION] * COUNT
        jobs[wrong] = {"runner": "function", "spec": {}}
        with pytest.raises(Invalid, match="name"):
            await harness.store.jobs.submit_many(jobs)
    assert await count(harness) == 0


async def test_depth_limit_counts_all_parts_of_a_call(harness: StoreHarness) -> None:
    await harness.store.queues.limit("default", depth=COUNT)
    with pytest.raises(QueueFull):
        await harness.store.jobs.submit_many([FUNCTION] * (COUNT + 1))
    assert await count(harness) == 0
    await harness.store.jobs.submit_many([FUNCTION] * COUNT)
    assert await count(harness) == COUNT


async def test_call_whose_jobs_name_each_other_is_not_divided(harness: StoreHarness) -> None:
    reused = await harness.store.jobs.submit_many([{**FUNCTION, "reuse_key": "k"}] * COUNT)
    assert len(set(reused)) == 1
    given = [f"01980000-0000-7000-8000-{n:012d}" for n in range(COUNT)]
    jobs = [{**FUNCTION, "id": one, "needs": given[n + 1 : n + 2]} for n, one in enumerate(given)]
    assert await harness.store.jobs.submit_many(jobs) == given
    with pytest.raises(Invalid, match="twice"):
        await harness.store.jobs.submit_many([{**FUNCTION, "id": given[0]}] * COUNT)


@pytest.mark.parametrize("kind", ["postgres"])
@pytest.mark.parametrize("failing", [1, 2, 3])
async def test_deadlock_in_any_part_repeats_the_whole_call(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    submit, sent = PostgresTx.submit, list[int]()

    async def fail_once(tx: PostgresTx, batch: Any) -> Any:
        sent.append(len(batch.jobs))
        rows = await submit(tx, batch)
        if len(sent) == failing:
            raise asyncpg.DeadlockDetectedError("of the test")
        return rows

    monkeypatch.setattr(PostgresTx, "submit", fail_once)
    ids = await harness.store.jobs.submit_many([{**FUNCTION, "inputs": {"n": n}} for n in range(COUNT)])
    assert sent == [*[10, 10, 5][:failing], 10, 10, 5]
    assert [(await harness.get(one)).inputs["n"] for one in ids] == list(range(COUNT))
    assert await count(harness) == COUNT
    harness.store.database.counters.deadlocks = 0


@pytest.mark.parametrize("kind", ["postgres"])
async def test_kill_between_two_parts_leaves_nothing(harness: StoreHarness) -> None:
    command = [sys.executable, "-c", KILLED, harness.url]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert (process.returncode, out.split()) == (-signal.SIGKILL, [b"10", b"10"])
    assert await count(harness) == 0
