"""Engines that were killed and forgot that a container was started, or how it ended."""

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.model import Job, Status
from holdfast.runner.docker.engine import ContainerInfo, Engine
from holdfast.store import orphans
from holdfast.worker import worker
from tests.support.crashing_worker import Hook
from tests.support.docker_engine import EXIT, DockerEngine
from tests.support.in_process_workers import InProcessWorkers
from tests.support.worker_processes import WorkerProcesses

STARTED = {
    "version": 1, "token": 1, "mark": "", "boot_id": "", "supervisor_pid": 1, "supervisor_start_ticks": 1,
    "supervisor_session": 1, "child_pid": 2, "child_start_ticks": 1, "child_session": 1, "started_at": 1, "boottime": 1,
}  # fmt: skip


async def only_created(processes: WorkerProcesses, docker: DockerEngine, folder: Path, **files: dict[str, Any]) -> Job:
    """Make a job whose container was never started according to its engine, with these files in its volume."""
    job = await processes.container("echo again", queue="forgotten")
    victim = processes.start({"forgotten": 1}, Hook(step="created", do="kill"))
    assert await victim.dead() == -signal.SIGKILL
    (name,) = docker.containers()
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
        docker.docker("cp", str(folder / file), f"{name}:/holdfast/attempt/{file}")
    return job


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let failed adopters retry without a pause."""
    monkeypatch.setattr(worker, "CRASHED_DELAY", 0.05)
    monkeypatch.setattr(orphans, "BACKOFF_BASE", 0.05)


@pytest.mark.usefixtures("at_once")
async def test_container_whose_start_the_engine_forgot_is_not_started_again(
    processes: WorkerProcesses, docker_for_processes: DockerEngine, tmp_path: Path
) -> None:
    """It may still run, so a person has to check. Proves R4, R5."""
    with docker_for_processes.recorded() as record:
        job = await only_created(processes, docker_for_processes, tmp_path, started=STARTED)
        async with processes.worker():
            paused = await processes.ended(job, Status.PAUSED)
        assert record.runs(job.id) == 0
    assert paused.error is not None
    assert paused.error.code == "internal"
    assert len(await processes.leases(job, "adopted")) >= 5
    assert len(docker_for_processes.containers()) == 1


async def test_container_that_ran_during_an_engine_outage_is_collected(
    processes: WorkerProcesses, docker_for_processes: DockerEngine, tmp_path: Path
) -> None:
    """Proves R4, R5, R22."""
    with docker_for_processes.recorded() as record:
        job = await only_created(processes, docker_for_processes, tmp_path, started=STARTED, exit=EXIT)
        async with processes.worker():
            ended = await processes.ended(job, Status.SUCCEEDED)
        assert record.runs(job.id) == 0
    assert (ended.attempts, ended.exit_code) == (1, 0)
    assert await processes.log(job) == []
    assert docker_for_processes.containers() == []


@pytest.mark.parametrize("unknown", [255, 0])
async def test_supervisor_record_wins_over_an_engine_that_missed_the_end(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch, unknown: int
) -> None:
    """One that was away when a container ended says 255, or 0; what the supervisor wrote counts. Proves R5, R22."""
    inspect = Engine.inspect

    async def forgetful(self: Engine, container: str) -> ContainerInfo:
        seen = await inspect(self, container)
        return seen if seen.status != "exited" else msgspec.structs.replace(seen, exit_code=unknown)

    monkeypatch.setattr(Engine, "inspect", forgetful)
    good, bad = await workers.container("echo good"), await workers.container("echo bad; exit 7")
    async with workers.worker():
        assert (await workers.ended(good, Status.SUCCEEDED)).exit_code == 0
        failed = await workers.ended(bad, Status.FAILED)
    assert failed.error is not None
    assert (failed.exit_code, failed.error.code) == (7, "exit_nonzero")
