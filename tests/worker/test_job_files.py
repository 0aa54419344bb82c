"""Deleting a job removes its record and its files together, and what a crash left undone is finished."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.assemble import store_of
from holdfast.client.app import Holdfast
from holdfast.errors import NotFound
from holdfast.model import Status
from holdfast.runner.job_files import JobFolders
from holdfast.store.retention import Retention
from tests.support.crashing_worker import Hook
from tests.support.docker_engine import DockerEngine
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.job_files import files_of
from tests.support.service import Service, service_in_process, service_process_on
from tests.support.worker_processes import WorkerProcesses

LEAVES_FILES = "cp -r input/. output/; echo made > output/made"
KEEPS_FILES = f"{LEAVES_FILES}; trap '' TERM; echo up; while :; do sleep 0.2; done"
GIVEN_AND_MADE = {"given.txt", "made"}
ALL = Retention(ages={Status.SUCCEEDED: 0.0}, grace=0.0)


async def submitted(client: httpx.AsyncClient, script: str, **fields: Any) -> str:
    """Submit a job with an upload over HTTP."""
    form = [("file", ("given.txt", b"given"))]
    upload = (await client.post("/v1/uploads", files=form)).json()["upload"]
    job = {"runner": "process", "spec": {"command": ["sh", "-c", script]}, "uploads": [upload], **fields}
    made = await client.post("/v1/jobs", json=job)
    assert made.status_code == 201, made.text
    return str(made.json()["id"])


def names(job: str, folder: Path) -> set[str]:
    return {Path(path).name for path in files_of(job, folder)}


async def gone(workers: InProcessWorkers, job: str) -> None:
    """Wait until a job is no longer in the record."""

    async def look() -> bool:
        with contextlib.suppress(NotFound):
            await workers.get(job)
            return False
        return True

    await eventually(look, f"job {job} is deleted")


@contextlib.contextmanager
def busy(folder: Path) -> Iterator[None]:
    """Keep a folder from being removed while the block lasts, by rights or, against root, by a mount."""
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    place = folder / "busy"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


async def test_no_file_of_a_job_is_left_when_delete_answers_deleted(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves D7, J15: also that a dry run keeps all."""
    url = workers.settings.database_url or ""
    async with service_in_process(url, workers.settings.data_dir) as service, service.client() as client:
        async with workers.worker():
            job = await submitted(client, LEAVES_FILES)
            await workers.ended(job, Status.SUCCEEDED)
        assert names(job, tmp_path) >= GIVEN_AND_MADE
        dry = await client.delete(f"/v1/jobs/{job}?dry_run=true")
        assert (dry.status_code, dry.json()) == (200, {"outcome": "would_delete"})
        assert names(job, tmp_path) >= GIVEN_AND_MADE
        done = await client.delete(f"/v1/jobs/{job}")
        assert (done.status_code, done.json()) == (200, {"outcome": "deleted"})
        assert files_of(job, tmp_path) == []
        folders = JobFolders(workers.settings.state, await workers.store.installation())
        assert (folders.attempts([job]), folders.workspaces([job])) == ({}, {})


async def test_refused_delete_keeps_the_files_and_a_forced_one_is_finished_after_the_server_died(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """Proves D7, J15."""
    with service_process_on(workers.settings.database_url or "", tmp_path / "data", reaper_interval="1") as service:
        async with workers.worker(), service.client() as client:
            job = await submitted(client, KEEPS_FILES, stop_grace=0.5)
            await workers.wait_for_log(job, "up")
            blocked = await client.delete(f"/v1/jobs/{job}")
            assert (blocked.status_code, blocked.json()["outcome"]) == (409, "blocked")
            dry = await client.delete(f"/v1/jobs/{job}?force=true&dry_run=true")
            assert (dry.status_code, dry.json()) == (200, {"outcome": "would_delete"})
            assert names(job, tmp_path) >= GIVEN_AND_MADE
            forced = await client.delete(f"/v1/jobs/{job}?force=true")
            assert (forced.status_code, forced.json()) == (202, {"outcome": "deleting"})
            await asyncio.to_thread(service.kill)
            await gone(workers, job)
            assert files_of(job, tmp_path) == [], "the record goes last"
        await asyncio.to_thread(service.start)


@pytest.mark.parametrize("step", ["files", "record"])
async def test_server_killed_between_the_steps_leaves_a_deletion_that_the_next_one_finishes(
    workers: InProcessWorkers, tmp_path: Path, step: str
) -> None:
    """Proves D7: killed before the files go, and before the record does."""
    service = Service(workers.settings.database_url or "", tmp_path / "data", reaper_interval="1")
    service.program = ("tests.support.dying_server", step)
    service.start()
    async with service.client() as client:
        async with workers.worker():
            job = await submitted(client, LEAVES_FILES)
            await workers.ended(job, Status.SUCCEEDED)
        with pytest.raises(httpx.TransportError):
            await client.delete(f"/v1/jobs/{job}")
        assert service.process is not None
        assert service.process.wait(30) == -signal.SIGKILL
        assert (await workers.get(job)).status is Status.SUCCEEDED, "the record stays as long as files may be left"
        assert (files_of(job, tmp_path) == []) is (step == "record")
    service.program = ("holdfast.cli.main", "serve")
    service.start()
    try:
        await gone(workers, job)
        assert files_of(job, tmp_path) == []
    finally:
        service.stop()


async def test_file_that_cannot_be_removed_keeps_the_record_and_is_tried_again(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """Proves D7: the log says which file, once."""
    with service_process_on(workers.settings.database_url or "", tmp_path / "data", reaper_interval="1") as service:
        async with service.client() as client:
            async with workers.worker():
                job = await submitted(client, LEAVES_FILES)
                await workers.ended(job, Status.SUCCEEDED)
            (folder,) = (workers.settings.shared / "artifacts" / job).iterdir()
            with busy(folder):
                answer = await client.delete(f"/v1/jobs/{job}")
                assert (answer.status_code, answer.json()) == (202, {"outcome": "deleting"})
                again = await client.delete(f"/v1/jobs/{job}")
                assert (again.status_code, again.json()) == (202, {"outcome": "deleting"})
                assert (await client.get(f"/v1/jobs/{job}")).status_code == 200
                resumed = await client.post(f"/v1/jobs/{job}/resume", json={})
                assert resumed.status_code == 409
            await gone(workers, job)
            assert files_of(job, tmp_path) == []
        said = [line for line in service.log.read_text().splitlines() if job in line and "not deleted yet" in line]
        assert len(said) == 1, said
        assert str(folder) in said[0]


async def test_jobs_whose_files_stay_do_not_keep_others_from_being_deleted(workers: InProcessWorkers) -> None:
    async with await store_of(workers.settings) as store:
        async with workers.worker():
            jobs = [await workers.sh("echo made > output/made") for _ in range(3)]
            for job in jobs:
                await workers.ended(job, Status.SUCCEEDED)
        (folder,) = (workers.settings.shared / "artifacts" / jobs[0].id).iterdir()
        with busy(folder):
            for job in jobs:
                await store.database.rows("request_deletion", id=job.id, tenant="default")
            assert [await store.jobs.finish_deletions(limit=1) for _ in range(4)] == [0, 1, 1, 0]
        assert await store.jobs.finish_deletions() == 1
        assert not (await store.jobs.list()).items


async def test_files_of_pruned_jobs_go_with_them(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves D7, J16."""
    async with workers.worker():
        jobs = [await workers.sh("echo made > output/made") for _ in range(2)]
        for job in jobs:
            await workers.ended(job, Status.SUCCEEDED)
    async with await store_of(workers.settings) as store:
        (folder,) = (workers.settings.shared / "artifacts" / jobs[0].id).iterdir()
        with busy(folder):
            assert (await store.pruning.prune(ALL)).removed == [jobs[1].id]
            assert files_of(jobs[1].id, tmp_path) == []
        assert await store.jobs.finish_deletions() == 1
    assert files_of(jobs[0].id, tmp_path) == []


async def test_folder_that_a_killed_worker_left_goes_before_the_record(
    processes: WorkerProcesses, tmp_path: Path
) -> None:
    """Proves D7: its worker died between the end of the job and the removal of its folder."""
    host = str(processes.host("a"))
    member = processes.start({"default": 1}, Hook(step="finished", do="kill"))
    with service_process_on(processes.settings.database_url or "", tmp_path / "data", state_dir=host, lease_ttl="3",
                 heartbeat_interval="1", reaper_interval="1") as service:  # fmt: skip
        async with service.client() as client:
            job = await submitted(client, LEAVES_FILES)
            await processes.ended(job, Status.SUCCEEDED)
            await member.dead()
            assert any("/attempts/" in path for path in files_of(job, tmp_path))
            answer = await client.delete(f"/v1/jobs/{job}")
            assert answer.json()["outcome"] == "deleting", "a mark stays until no other worker can start it"
            await gone(processes, job)
            assert files_of(job, tmp_path) == []


async def test_worker_that_lost_its_lease_leaves_nothing_of_a_deleted_job(
    processes: WorkerProcesses, tmp_path: Path
) -> None:
    """Proves D7: it had collected the outputs, slept, and woke after the job was deleted."""
    sleeper = processes.start({"default": 1}, Hook(step="gathered", do="stop"), host="a")
    job = await processes.sh("echo made > output/made")
    await sleeper.stopped()
    other = processes.start({"default": 1}, host="a")
    await processes.ended(job, Status.SUCCEEDED)
    async with await store_of(processes.settings) as store:
        await store.jobs.delete(job.id)
        await gone(processes, job.id)
    sleeper.signal(signal.SIGCONT)

    async def dropped() -> bool:
        return not files_of(job.id, processes.settings.shared)

    await eventually(dropped, "its outputs are removed")
    assert sleeper.status is None
    assert other.status is None


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_container_that_a_killed_worker_left_goes_before_the_record(
    processes: WorkerProcesses, docker_for_processes: DockerEngine, tmp_path: Path
) -> None:
    """Proves D7, for containers and their volumes."""
    member = processes.start({"default": 1}, Hook(step="finished", do="kill"))
    job = await processes.container("echo made > output/made")
    await processes.ended(job, Status.SUCCEEDED)
    await member.dead()
    assert docker_for_processes.containers() != []
    async with await store_of(processes.settings) as store:
        assert (await store.jobs.delete(job.id)).outcome == "deleted"
    assert (docker_for_processes.containers(), docker_for_processes.volumes()) == ([], [])
    assert files_of(job.id, tmp_path) == []


async def test_application_that_deletes_leaves_the_files_to_a_worker(
    workers: InProcessWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves D7: an application has no shared folder of its own."""
    monkeypatch.chdir(tmp_path)
    async with workers.worker(), Holdfast(workers.settings.database_url) as app:
        job = await workers.sh("echo made > output/made")
        await workers.ended(job, Status.SUCCEEDED)
        assert (await app.store.jobs.delete(job.id)).outcome == "deleting"
        await gone(workers, job.id)
        assert files_of(job.id, tmp_path) == []
