"""The options of a function's decorator apply to its jobs, by every way of submitting."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast import Holdfast
from holdfast.model import Job, Status
from holdfast.store.submit_in_transaction import submit_inside, submit_inside_async
from tests.support.in_process_workers import InProcessWorkers
from tests.support.service import service_in_process
from tests.support.store_harness import StoreHarness

PLAY: dict[str, Any] = {"runner": "function", "spec": {"name": "play"}}


async def registered(harness: StoreHarness, revision: int = 0, /, **defaults: Any) -> None:
    await harness.store.workers.register_functions([("play", revision, defaults)])


async def submitted(harness: StoreHarness, way: str, job: dict[str, Any], tmp_path: Path) -> Job:
    """Submit a job in one of the ways that there are."""
    match way:
        case "store":
            return await harness.store.jobs.submit(job)
        case "http":
            async with service_in_process(harness.url, tmp_path / "data") as service, service.client() as client:
                answer = await client.post("/v1/jobs", json=job)
                assert answer.status_code == 201, answer.text
                return await harness.store.jobs.get(answer.json()["id"])
        case "app":
            app = Holdfast(harness.url)
            app.function(name="play", queue="stale")(lambda: None)
            async with app:
                return (await app.submit("play")).record
        case "sql":
            connection = await asyncpg.connect(harness.url)
            found = await connection.fetchval("SELECT id FROM holdfast.holdfast_submit($1::jsonb)", json.dumps(job))
            await connection.close()
            return await harness.store.jobs.get(str(found))
        case _ if harness.kind == "sqlite":
            with sqlite3.connect(harness.store.database.path) as own:  # type: ignore[union-attr]
                (accepted,) = submit_inside(own, [job])
            own.close()
            return await harness.store.jobs.get(accepted.id)
    connection = await asyncpg.connect(harness.url)
    (accepted,) = await submit_inside_async(connection, [job])
    await connection.close()
    return await harness.store.jobs.get(accepted.id)


WAYS = [(kind, way) for kind in ("sqlite", "postgres") for way in ("store", "http", "app", "inside")]


@pytest.mark.parametrize(("kind", "way"), [*WAYS, ("postgres", "sql")])
async def test_defaults_of_a_function_hold_for_every_way_of_submitting(
    harness: StoreHarness, way: str, tmp_path: Path
) -> None:
    """Proves G2. What a submit says itself wins."""
    await registered(harness, queue="desktop", timeout=7)
    job = await submitted(harness, way, PLAY, tmp_path)
    assert (job.queue, job.policy.timeout) == ("desktop", 7)
    if way != "app":
        job = await submitted(harness, way, {**PLAY, "queue": "default", "timeout": 9}, tmp_path)
        assert (job.queue, job.policy.timeout) == ("default", 9)
        job = await submitted(harness, way, {"runner": "function", "spec": {"name": "other"}}, tmp_path)
        assert (job.queue, job.policy.timeout) == ("default", None)


@pytest.mark.parametrize("kind", ["postgres"])
async def test_policy_of_a_job_from_sql_is_completed_not_replaced(harness: StoreHarness, tmp_path: Path) -> None:
    await registered(harness, queue="desktop", timeout=7)
    job = await submitted(harness, "sql", {**PLAY, "idle_timeout": 3}, tmp_path)
    assert (job.queue, job.policy.timeout, job.policy.idle_timeout) == ("desktop", 7, 3)
    job = await submitted(harness, "sql", {**PLAY, "queue": None, "timeout": 2}, tmp_path)
    assert (job.queue, job.policy.timeout) == ("desktop", 2)


async def test_lower_revision_overwrites_nothing_and_a_higher_one_may_drop_a_default(harness: StoreHarness) -> None:
    """Proves G2. Two releases of a worker at once; a function that lost its default; jobs from before keep theirs."""
    before = await harness.store.jobs.submit(PLAY)
    await registered(harness, 2, queue="new")
    await registered(harness, 1, queue="old")
    assert (await harness.store.jobs.submit(PLAY)).queue == "new"
    await registered(harness, 2, queue="newer")
    assert (await harness.store.jobs.submit(PLAY)).queue == "newer"
    await registered(harness, 3)
    assert (await harness.store.jobs.submit(PLAY)).queue == "default"
    assert (await harness.store.jobs.get(before.id)).queue == "default"


async def test_app_knows_its_own_functions_before_any_worker_registered_them(harness: StoreHarness) -> None:
    app = Holdfast(harness.url)
    app.function(name="play", queue="mine", timeout=5)(lambda: None)
    async with app:
        job = (await app.submit("play")).record
    assert (job.queue, job.policy.timeout) == ("mine", 5)


async def test_worker_registers_its_functions_when_it_starts(workers: InProcessWorkers) -> None:
    """Proves G2. The job is picked up in the queue that the decorator names."""
    workers.functions.add(name="play", queue="desktop", revision=4)(lambda: "played")
    async with workers.worker({"desktop": 1}) as worker:
        await worker.started.wait()
        ended = await workers.ended(await workers.submit("play"), Status.SUCCEEDED)
    assert (ended.queue, ended.result) == ("desktop", "played")
