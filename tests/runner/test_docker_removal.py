"""Removal of ended containers: after the starts, few at a time, never too many left; the sweep removes the rest."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast.model import Status
from holdfast.runner.docker import container_removal
from holdfast.runner.docker import runner as docker_runner
from holdfast.runner.docker.container_removal import AT_ONCE, GIVE_WAY, ContainerRemover
from holdfast.runner.docker.engine import Engine
from holdfast.worker import queue_slots
from holdfast.worker.upkeep import Upkeep
from tests.runner.test_docker_sweep import upkeep_of
from tests.support.docker_engine import DockerEngine, api
from tests.support.in_process_workers import InProcessWorkers, eventually


@pytest.fixture
def kind() -> str:
    """One store is enough: containers do not depend on it."""
    return "sqlite"


class FakeEngine:
    """Removes a container once a test lets it."""

    def __init__(self) -> None:
        self.removing: list[str] = []
        self.most = 0
        self.go = asyncio.Event()

    async def remove(self, container: str) -> None:
        self.removing.append(container)
        self.most = max(self.most, len(self.removing))
        await self.go.wait()
        self.removing.remove(container)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_removal, "LONGEST", 3600.0)


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("patient")
async def test_removal_gives_way_to_starts(engine: Any) -> None:
    engine.go.set()
    remover = ContainerRemover(engine)
    remover.start_begins()
    remover.start_begins()
    removal = asyncio.create_task(remover.remove("one"))
    await settled()
    remover.start_ended()
    await settled()
    assert (removal.done(), remover.waiting) == (False, 1)
    remover.start_ended()
    await removal
    assert remover.waiting == 0


@pytest.mark.usefixtures("patient")
async def test_backlog_no_longer_gives_way(engine: Any) -> None:
    remover = ContainerRemover(engine)
    remover.start_begins()
    removals = [asyncio.create_task(remover.remove(str(n))) for n in range(GIVE_WAY)]
    await settled()
    assert engine.removing == []
    removals.append(asyncio.create_task(remover.remove("one more")))
    await settled()
    assert len(engine.removing) == AT_ONCE
    engine.go.set()
    await asyncio.gather(*removals)
    assert engine.most == AT_ONCE


async def test_removal_waits_for_a_start_only_so_long(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_removal, "LONGEST", 0.01)
    engine.go.set()
    remover = ContainerRemover(engine)
    remover.start_begins()
    await remover.remove("one")


async def test_failed_removal_frees_its_place(engine: Any) -> None:
    async def fails(container: str) -> None:
        raise OSError(container)

    engine.remove = fails
    remover = ContainerRemover(engine)
    for _ in range(AT_ONCE + 1):
        with pytest.raises(OSError, match="one"):
            await remover.remove("one")
    assert remover.waiting == 0


async def test_slow_removals_hold_back_claims_and_not_slots(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R16. A slot is free as soon as its job has ended; but containers do not pile up without end."""
    monkeypatch.setattr(queue_slots, "CLEARING", 2)
    go = asyncio.Event()
    remove = Engine.remove

    async def slowly(self: Engine, container: str) -> None:
        await go.wait()
        await remove(self, container)

    monkeypatch.setattr(Engine, "remove", slowly)
    jobs = [await workers.container("true") for _ in range(4)]
    async with workers.worker({"default": 1}):
        for job in jobs[:2]:
            await workers.ended(job, Status.SUCCEEDED)
        assert len(docker.containers()) == 2
        assert [(await workers.get(job)).status for job in jobs[2:]] == [Status.QUEUED] * 2
        go.set()
        for job in jobs[2:]:
            await workers.ended(job, Status.SUCCEEDED)
    assert (docker.containers(), docker.volumes()) == ([], [])


@pytest.fixture
async def sweeper(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Upkeep]:
    monkeypatch.setattr(docker_runner, "GRACE_SECONDS", -10.0)
    async with api(docker) as engine:
        yield await upkeep_of(workers, engine)


async def test_engine_that_goes_away_at_a_removal_leaves_it_to_the_sweep(
    workers: InProcessWorkers, docker: DockerEngine, sweeper: Upkeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R16, R5: the end is recorded and stays so."""
    remove = Engine.remove
    away = asyncio.Event()

    async def without_engine(self: Engine, container: str) -> None:
        if not away.is_set():
            await asyncio.to_thread(docker.kill)
            away.set()
        await remove(self, container)

    monkeypatch.setattr(Engine, "remove", without_engine)
    async with workers.worker():
        job = await workers.container("echo hello")
        await workers.ended(job, Status.SUCCEEDED)
        await away.wait()
        await asyncio.to_thread(docker.start)
        (name,) = docker.containers()
        assert job.id in name

        async def swept() -> bool:
            await sweeper.sweep()
            return (docker.containers(), docker.volumes()) == ([], [])

        await eventually(swept, "the sweep removes container and volume")
    assert ((await workers.get(job)).attempts, await workers.log(job)) == (1, ["hello"])
