"""Metrics: what waits and for how long, what every worker did, what the server does; for whoever has a token."""

import os
import signal
from pathlib import Path

import asyncpg
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.model import Role, Status
from holdfast.runner.folder import Folder
from tests.rig import Rig, eventually
from tests.service import FUNCTION, Served, serving_here

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


async def test_jobs_are_counted_by_queue_and_status_and_the_oldest_has_an_age(served: Served) -> None:
    async with served.client() as client:
        for extra in ({}, {}, {"hold": True}, {"queue": "other", "available_at": "2100-01-01T00:00:00Z"}):
            assert (await client.post("/v1/jobs", json={**FUNCTION, **extra})).status_code == 201
        found = await figures(client)
        assert value(found, "holdfast_jobs", queue="default", status="queued") == 2
        assert value(found, "holdfast_jobs", queue="default", status="pending") == 1
        assert value(found, "holdfast_jobs", queue="other", gate="future") == 1
        assert value(found, "holdfast_oldest_queued_seconds", queue="default") > 0
        assert value(found, "holdfast_oldest_queued_seconds", queue="other") == 0
        async with served.client(await served.token(Role.VIEWER, "blue")) as stranger:
            assert value(await figures(stranger), "holdfast_jobs") == 0


async def test_what_workers_did_is_told_by_the_server_and_by_name(rig: Rig, tmp_path: Path) -> None:
    url = rig.settings.database_url or ""
    async with serving_here(url, tmp_path / "data") as served, served.client() as client, rig.worker() as worker:
        await rig.ended(await rig.sh("true"), Status.SUCCEEDED)
        await rig.ended(await rig.sh("exit 1", max_attempts=2, retry={"base": 0, "cap": 0}), Status.FAILED)

        async def told() -> Figures | None:
            found = await figures(client)
            return found if value(found, "holdfast_finishes_total", worker=worker.id) == 3 else None

        found = await eventually(told, "the worker reports")
        assert value(found, "holdfast_claims_total", worker=worker.id) == 3
        assert [
            value(found, "holdfast_finishes_total", status=status) for status in ("succeeded", "failed", "queued")
        ] == [1, 1, 1]
        assert value(found, "holdfast_workers", live="true") == 1
        for name in ("adoptions", "losses", "leases_lost", "reaped", "errors", "deadlocks"):
            assert value(found, f"holdfast_{name}_total") == 0
        assert any(name == "holdfast_duty_done_timestamp_seconds" for name, _ in found)


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_adoptions_and_losses_are_counted(rig: Rig, tmp_path: Path) -> None:
    async with serving_here(rig.settings.database_url or "", tmp_path / "data") as served, served.client() as client:
        kept, lost = await rig.sh("sleep 600"), await rig.sh("sleep 600")
        async with rig.worker():
            await rig.running(kept)
            await rig.running(lost)
        (folder,) = [folder for folder in rig.folders if lost.id in folder.name]
        kill_supervisor(folder)
        async with rig.worker():
            await rig.ended(lost, Status.FAILED)
            await rig.store.jobs.cancel(kept.id)
            await rig.ended(kept, Status.CANCELLED)

            async def told() -> bool:
                found = await figures(client)
                return (value(found, "holdfast_adoptions_total"), value(found, "holdfast_losses_total")) == (2, 1)

            await eventually(told, "two were adopted, one was lost")


def kill_supervisor(folder: Path) -> None:
    """Kill -9 what watches over an attempt; what it watched dies with it."""
    started = Folder(folder).started()
    assert started is not None
    os.kill(started.supervisor_pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["postgres"])
async def test_database_that_does_not_answer_is_counted(clean_url: str, tmp_path: Path) -> None:
    times = {"lease_ttl": 1.5, "heartbeat_interval": 0.5}
    async with serving_here(clean_url, tmp_path / "data", **times) as served, served.client() as client:
        before = value(await figures(client), "holdfast_errors_total", worker="server")
        other = await asyncpg.connect(clean_url)
        async with other.transaction():
            await other.execute("LOCK TABLE holdfast.jobs IN ACCESS EXCLUSIVE MODE")
            answer = await client.get("/v1/jobs")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        await other.close()
        assert value(await figures(client), "holdfast_errors_total", worker="server") == before + 1
