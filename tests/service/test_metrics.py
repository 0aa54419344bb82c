"""Metrics: what waits and for how long, what every worker did, what the server does; for every token."""

import asyncio
import itertools
import os
import signal
from collections import Counter
from pathlib import Path

import asyncpg
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.api import depths
from holdfast.api.depths import DepthCounter
from holdfast.model import Role, Status
from holdfast.runner.attempt_folder import AttemptFolder
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.service import FUNCTION, Service, opened, service_in_process
from tests.support.store_harness import StoreHarness
from tests.support.worker_processes import WorkerProcesses

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def figures(client: httpx.AsyncClient) -> Figures:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(found: Figures, name: str, /, **labels: str) -> float:
    """The sum of all samples of a name that have these labels."""
    return sum(
        number for (known, has), number in found.items() if known == name and labels.items() <= dict(has).items()
    )


async def test_jobs_are_counted_by_queue_and_status_and_the_oldest_has_an_age(service: Service) -> None:
    async with service.client() as client:
        for extra in ({}, {}, {"hold": True}, {"queue": "other", "available_at": "2100-01-01T00:00:00Z"}):
            assert (await client.post("/v1/jobs", json={**FUNCTION, **extra})).status_code == 201
        found = await figures(client)
        assert value(found, "holdfast_jobs", queue="default", status="queued") == 2
        assert value(found, "holdfast_jobs", queue="default", status="pending") == 1
        assert value(found, "holdfast_jobs", queue="other", gate="future") == 1
        assert value(found, "holdfast_oldest_queued_seconds", queue="default") > 0
        assert value(found, "holdfast_oldest_queued_seconds", queue="other") == 0
        async with service.client(await service.token(Role.VIEWER, "blue")) as stranger:
            assert value(await figures(stranger), "holdfast_jobs") == 0


async def test_server_reports_the_counters_of_each_worker(workers: InProcessWorkers, tmp_path: Path) -> None:
    url = workers.settings.database_url or ""
    async with (
        service_in_process(url, tmp_path / "data") as service,
        service.client() as client,
        workers.worker() as worker,
    ):
        await workers.ended(await workers.sh("true"), Status.SUCCEEDED)
        await workers.ended(await workers.sh("exit 1", max_attempts=2, retry={"base": 0, "cap": 0}), Status.FAILED)

        async def reported() -> Figures | None:
            found = await figures(client)
            return found if value(found, "holdfast_finishes_total", worker=worker.id) == 3 else None

        found = await eventually(reported, "the worker reports")
        assert value(found, "holdfast_claims_total", worker=worker.id) == 3
        assert [
            value(found, "holdfast_finishes_total", status=status) for status in ("succeeded", "failed", "queued")
        ] == [1, 1, 1]
        assert value(found, "holdfast_workers", live="true") == 1
        for name in ("adoptions", "losses", "leases_lost", "reaped", "errors", "deadlocks"):
            assert value(found, f"holdfast_{name}_total") == 0
        assert any(name == "holdfast_duty_done_timestamp_seconds" for name, _ in found)


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_adoptions_and_losses_are_counted(workers: InProcessWorkers, tmp_path: Path) -> None:
    async with (
        service_in_process(workers.settings.database_url or "", tmp_path / "data") as service,
        service.client() as client,
    ):
        kept, lost = await workers.sh("sleep 600"), await workers.sh("sleep 600")
        async with workers.worker():
            await workers.running(kept)
            await workers.running(lost)
        (folder,) = [folder for folder in workers.folders if lost.id in folder.name]
        kill_supervisor(folder)
        async with workers.worker():
            await workers.ended(lost, Status.FAILED)
            await workers.store.jobs.cancel(kept.id)
            await workers.ended(kept, Status.CANCELLED)

            async def reported() -> bool:
                found = await figures(client)
                return (value(found, "holdfast_adoptions_total"), value(found, "holdfast_losses_total")) == (2, 1)

            await eventually(reported, "two were adopted, one was lost")


def kill_supervisor(folder: Path) -> None:
    """Kill the supervisor of an attempt; its child dies with it."""
    started = AttemptFolder(folder).started()
    assert started is not None
    os.kill(started.supervisor_pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["postgres"])
async def test_database_that_does_not_answer_is_counted(clean_url: str, tmp_path: Path) -> None:
    times = {"lease_ttl": 9.0, "heartbeat_interval": 3.0}
    async with service_in_process(clean_url, tmp_path / "data", **times) as service, service.client() as client:
        before = value(await figures(client), "holdfast_errors_total", worker="server")
        other = await asyncpg.connect(clean_url)
        async with other.transaction():
            await other.execute("LOCK TABLE holdfast.jobs IN ACCESS EXCLUSIVE MODE")
            answer = await client.get("/v1/jobs")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        await other.close()
        assert value(await figures(client), "holdfast_errors_total", worker="server") == before + 1


# Depths and counters at scale


def in_queue(count: int, queue: str, **extra: object) -> list[dict[str, object]]:
    return [{**FUNCTION, "queue": queue, **extra} for _ in range(count)]


async def submit(url: str, jobs: list[dict[str, object]]) -> None:
    async with opened(url) as store:
        for n in range(0, len(jobs), 5000):
            await store.jobs.submit_many(jobs[n : n + 5000])


async def test_a_deep_queue_hides_no_other(service: Service) -> None:
    """Proves T7."""
    jobs = in_queue(15_000, "aaa") + in_queue(3, "zzz") + in_queue(2, "zzz", hold=True)
    await submit(service.database_url, jobs)
    async with service.client() as client:
        found = await figures(client)
        assert value(found, "holdfast_jobs", queue="aaa") == 15_000
        assert value(found, "holdfast_jobs", queue="zzz", gate="open") == 3
        assert value(found, "holdfast_jobs", queue="zzz", gate="held") == 2
        assert value(found, "holdfast_oldest_queued_seconds", queue="zzz") > 0
        assert 0 <= value(found, "holdfast_jobs_age_seconds") <= 10
        items = (await client.get("/v1/queues")).json()["items"]
        assert {item["queue"]: item["counts"]["open"] for item in items} == {"aaa": 15_000, "zzz": 3}


async def test_depths_that_are_slow_to_count_are_kept_fresh_beside_the_answers(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves T7. Every count is slow here; answers come from the last one, and it is soon followed by another."""
    monkeypatch.setattr(depths, "FEW", -1)
    counts = DepthCounter(harness.store)
    first = await counts.get()
    assert first.depths == []
    await harness.submit()
    assert (await counts.get()) is first
    task = asyncio.create_task(counts.run())

    async def fresh() -> bool:
        return [depth.open for depth in (await counts.get()).depths] == [1]

    try:
        await eventually(fresh, "the background task counts again")
        assert (await counts.get()).age <= depths.MOST_AGE
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_counters_agree_with_the_database_after_worker_exits(processes: WorkerProcesses, tmp_path: Path) -> None:
    """Proves T7. Workers leave in order, by SIGTERM, by kill -9, and come again; another forgets the dead one's row."""
    async with service_in_process(processes.settings.url, tmp_path / "data") as service, service.client() as client:
        sums: list[dict[str, float]] = []

        async def counted() -> dict[str, float]:
            found = await figures(client)
            names = ("succeeded", "failed", "queued")
            finishes = {name: value(found, "holdfast_finishes_total", status=name) for name in names}
            return {**finishes, "claims": value(found, "holdfast_claims_total")}

        async def agree() -> bool:
            """The scrape says what the record of all attempts says."""
            sums.append(await counted())
            return sums[-1] == await recorded(processes)

        member = processes.start({"default": 4})
        await some_jobs(processes)
        await eventually(agree, "counted while the worker lives")
        member.signal(signal.SIGTERM)
        assert await member.dead() == 0
        assert await agree(), "counted after it left"
        member = processes.start({"default": 4})
        await some_jobs(processes)
        await eventually(agree, "counted again")
        member.kill()
        assert await agree(), "counted after kill -9"
        processes.start({"default": 4})
        await some_jobs(processes)
        await eventually(agree, "counted when another has taken over")

        async def forgotten() -> bool:
            return len(await processes.store.workers.list()) == 1

        await eventually(forgotten, "the dead worker's row is gone")
        assert await agree()
        for before, after in itertools.pairwise(sums):
            assert all(before[name] <= after[name] for name in before), (before, after)


async def some_jobs(processes: WorkerProcesses) -> None:
    jobs = [await processes.sh(script) for script in ("true", "true", "exit 1")]
    jobs.append(await processes.sh("exit 2", max_attempts=2, retry={"base": 0, "cap": 0, "on": ["failed"]}))
    for job in jobs:
        await processes.ended(job)


async def recorded(processes: WorkerProcesses) -> dict[str, int]:
    """What the attempts in the database say."""
    ends = Counter[str]()
    claims = 0
    for job in (await processes.store.jobs.list(limit=1000)).items:
        claims += job.attempt
        ends[job.status] += 1
        ends["queued"] += job.attempt - 1
    return {name: ends[name] for name in ("succeeded", "failed", "queued")} | {"claims": claims}


async def test_worker_whose_row_was_removed_counts_nothing_twice(workers: InProcessWorkers) -> None:
    """A person declared its host gone, but it was only cut off, and reports its counters again."""
    async with workers.worker() as worker:
        await workers.ended(await workers.sh("true"), Status.SUCCEEDED)

        async def sum_is(count: int) -> bool:
            reports = [await workers.store.workers.totals(), *(w.figures for w in await workers.store.workers.list())]
            return sum(int(report.get("claims", 0)) for report in reports) == count

        await eventually(lambda: sum_is(1), "it reports")
        await workers.store.workers.delete(worker.id)
        assert await sum_is(1)
        await workers.ended(await workers.sh("true"), Status.SUCCEEDED)
        await eventually(lambda: sum_is(2), "it registers and reports again")
    assert await sum_is(2)
    assert (await workers.store.workers.totals())["finishes"] == {"succeeded": 2}


async def test_server_adds_its_counters_to_the_totals_when_it_stops(clean_url: str, tmp_path: Path) -> None:
    async with service_in_process(clean_url, tmp_path / "data"):
        pass
    async with opened(clean_url) as store:
        assert set(await store.workers.totals()) >= {"claims", "reaped", "errors", "finishes"}
