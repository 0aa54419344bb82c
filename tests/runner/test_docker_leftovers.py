"""Leftover containers in which nothing ran: started too late, or half removed by their engine."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from holdfast.model import Claimable, Job, Status
from holdfast.runner.base import ContainerLimits, Identity, StartRequest, StartTooLate
from holdfast.runner.docker import container
from holdfast.runner.docker.container_config import name_of
from holdfast.runner.docker.engine import ContainerInfo, Engine
from holdfast.runner.docker.runner import DockerRunner
from holdfast.worker.held_leases import LeaseLost, boottime
from tests.support.docker_engine import DockerEngine, api
from tests.support.in_process_workers import InProcessWorkers

OWNER = "first-owner"


@pytest.fixture
def kind() -> str:
    """One store is enough: containers do not depend on it."""
    return "sqlite"


@contextlib.asynccontextmanager
async def owned(
    workers: InProcessWorkers, docker: DockerEngine, job: Job
) -> AsyncIterator[tuple[DockerRunner, StartRequest]]:
    """Act as a worker that claimed a job; afterwards it is known to be dead."""
    async with api(docker) as engine:
        installation = await workers.store.installation()
        runner = DockerRunner(
            engine, installation, limits=ContainerLimits(), log_cap=1 << 20, state=workers.settings.state
        )
        await runner.check()
        pair = Claimable(queue=job.queue, capability="docker", domain=runner.domain)
        (lease,) = (await workers.store.leases.claim(OWNER, [pair], slots=1, ttl=60)).claimed
        identity = Identity(installation, lease.id, lease.attempt)
        order = StartRequest(
            identity=identity, domain=lease.domain, token=lease.token, spec=lease.spec, inputs=lease.inputs,
            start_by=boottime() + 50,
        )  # fmt: skip
        yield runner, order
    await workers.store.leases.orphan(OWNER)


async def yes() -> None:
    """Confirm that the lease is still ours."""


async def lost() -> None:
    raise LeaseLost


async def test_container_that_was_started_too_late_does_not_hold_up_a_cancelled_job(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """Proves C1, L15: its supervisor left with nothing done, and nobody waits for it."""
    job = await workers.container("echo ran")
    async with owned(workers, docker, job) as (runner, order):
        with pytest.raises(StartTooLate):
            await runner.start(late(order), yes)
    assert state(docker, order)["ExitCode"] == 123
    await workers.store.jobs.cancel(job.id)
    async with workers.worker():
        await workers.ended(job, Status.CANCELLED)
    assert docker.containers() == []


async def test_start_that_comes_too_late_on_a_slow_engine_is_no_loss(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L13, R22: an engine that says nothing for long does not make a start of what never began."""
    monkeypatch.setattr(container, "BEGIN_SECONDS", 0.01)
    job = await workers.container("echo ran")
    async with owned(workers, docker, job) as (runner, order):
        with pytest.raises(StartTooLate):
            await runner.start(late(order), yes)
    async with workers.worker():
        assert (await workers.ended(job, Status.SUCCEEDED)).attempts == 1


async def test_container_that_never_began_is_no_loss_though_its_engine_does_not_know(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R4, L13: an engine that was killed in the middle of the start says 255, and the volume says nothing."""
    inspect = Engine.inspect

    async def forgetful(self: Engine, name: str) -> ContainerInfo:
        seen = await inspect(self, name)
        return msgspec.structs.replace(seen, exit_code=255) if seen.exit_code == 123 else seen

    job = await workers.container("echo ran")
    async with owned(workers, docker, job) as (runner, order):
        with pytest.raises(StartTooLate):
            await runner.start(late(order), yes)
    monkeypatch.setattr(Engine, "inspect", forgetful)
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, ended.attempt) == (1, 1)
    assert docker.containers() == []


@pytest.mark.skipif(shutil.which("chattr") is None, reason="there is no chattr")
async def test_half_removed_container_is_no_loss(workers: InProcessWorkers, docker: DockerEngine) -> None:
    """Proves R4, L13: the engine calls it dead, with the exit code 0. Nothing of the attempt ran, so it starts."""
    job = await workers.container("echo ran")
    async with owned(workers, docker, job) as (runner, order):
        with pytest.raises(LeaseLost):
            await runner.start(order, lost)
    with unremovable(docker, order):
        with pytest.raises(subprocess.CalledProcessError):
            docker.docker("rm", "-v", name_of(order.identity))
        assert (state(docker, order)["Status"], state(docker, order)["ExitCode"]) == ("dead", 0)
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, await workers.log(job)) == (1, ["ran"])


def late(order: StartRequest) -> StartRequest:
    return msgspec.structs.replace(order, start_by=boottime() - 1)


def state(docker: DockerEngine, order: StartRequest) -> Any:
    return json.loads(docker.docker("inspect", name_of(order.identity)))[0]["State"]


@contextlib.contextmanager
def unremovable(docker: DockerEngine, order: StartRequest) -> Any:
    """While the block lasts, the engine fails to remove a container, and leaves it half-way."""
    (found,) = json.loads(docker.docker("inspect", name_of(order.identity)))
    upper = found["GraphDriver"]["Data"]["UpperDir"]
    subprocess.run(["chattr", "+i", upper], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", upper], check=True)
