"""The Docker engine's disk is full when a container is to start: the job waits, and runs once."""

from typing import Any

import pytest

from holdfast.model import Cause, Status
from holdfast.runner.docker import container_config
from holdfast.runner.docker.engine import Engine, EngineError
from holdfast.runner.supervisor.protocol import ExitStatus
from tests.support.attempt_records import assert_only_waited, attempts_of
from tests.support.docker_engine import DockerEngine
from tests.support.in_process_workers import InProcessWorkers


@pytest.mark.parametrize("call", ["create", "put", "start"])
@pytest.mark.usefixtures("short_pauses")
async def test_engine_without_space_gives_the_job_back(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The engine's own disk is full: at the container, its files, or its start. Nothing is left, and it runs once."""
    full = [1]
    real = getattr(Engine, call)

    async def refused(self: Engine, *arguments: Any) -> Any:
        if full.pop() if full else 0:
            raise EngineError(500, "write /var/lib/docker/volumes/x: no space left on device")
        return await real(self, *arguments)

    monkeypatch.setattr(Engine, call, refused)
    job = await workers.container("echo ran")
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, await workers.log(job)) == (1, ["ran"])
    first, last = await attempts_of(workers, job)
    assert_only_waited([first])
    assert last.cause is Cause.EXIT


@pytest.mark.usefixtures("short_pauses")
async def test_container_whose_supervisor_has_no_space_gives_the_job_back(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its volume is full: the supervisor exits with the status that says so."""
    program = container_config.program
    full = [1]

    def without_space() -> bytes:
        return f"#!/bin/sh\nexit {ExitStatus.LEFT_FULL}\n".encode() if full and full.pop() else program()

    monkeypatch.setattr(container_config, "program", without_space)
    job = await workers.container("echo ran")
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, await workers.log(job)) == (1, ["ran"])
    first, last = await attempts_of(workers, job)
    assert_only_waited([first])
    assert last.cause is Cause.EXIT
