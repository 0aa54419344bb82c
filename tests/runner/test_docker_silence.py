"""An engine that runs but does not respond: silent connections, a refused log, slow starts."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec
import pytest

from holdfast.model import Status
from holdfast.runner.base import ConfirmLease, EngineUnreachable, StartRequest
from holdfast.runner.docker import container, container_log, engine
from holdfast.runner.docker import runner as docker_runner
from holdfast.runner.docker.container import ContainerHandle
from holdfast.runner.docker.engine import Engine, EngineError, EngineInfo
from holdfast.runner.docker.runner import DockerRunner
from holdfast.worker.held_leases import boottime
from tests.runner.test_docker_leftovers import owned, yes
from tests.support.docker_engine import DockerEngine, api
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.proxy import Proxy

WAITING = "echo up; while [ ! -e go ]; do sleep 0.1; done; echo gone"


@pytest.fixture
def kind() -> str:
    """One store is enough: containers do not depend on it."""
    return "sqlite"


async def test_silent_connections_do_not_hide_the_end(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R5, R10. A firewall before a remote engine may drop idle connections silently."""
    monkeypatch.setattr(container, "WAIT_SECONDS", 1.0)
    monkeypatch.setattr(container_log, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(engine, "CALL_TIMEOUT", aiohttp.ClientTimeout(total=1.0))
    async with Proxy(docker.socket).run() as proxy:
        workers.set(docker_host=f"tcp://127.0.0.1:{proxy.port}")
        async with workers.worker():
            job = await workers.container(WAITING)
            await workers.wait_for_log(job, "up")
            assert proxy.swallow() >= 2
            (name,) = docker.containers()
            docker.docker("exec", "-u", "65532", name, "touch", "/holdfast/attempt/work/go")
            ended = await workers.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, await workers.log(job)) == (1, ["up", "gone"])


async def test_refused_log_request_is_retried(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R10. An engine that is short of something refuses for a moment; a job must not be silent until its end."""
    refused: list[str] = []
    log = Engine.log

    async def once(self: Engine, name: str, **more: Any) -> AsyncGenerator[tuple[str, bytes], None]:
        if not refused:
            refused.append(name)
            raise EngineError(500, "too many open files")
        async for line in log(self, name, **more):
            yield line

    monkeypatch.setattr(Engine, "log", once)
    async with workers.worker():
        job = await workers.container(WAITING)
        await workers.wait_for_log(job, "up")
        (name,) = docker.containers()
        docker.docker("exec", "-u", "65532", name, "touch", "/holdfast/attempt/work/go")
        await workers.ended(job, Status.SUCCEEDED)
    assert (len(refused), await workers.log(job)) == (1, ["up", "gone"])


async def test_start_that_loses_its_engine_leaves_no_log_reader(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R5. The adopter starts its own reader, so the old one must end."""
    waits: list[ContainerHandle] = []

    async def away(self: ContainerHandle) -> bool:
        waits.append(self)
        raise EngineUnreachable("it went away")

    async def nothing(self: ContainerHandle) -> bool:
        return False

    job = await workers.container("sleep 600", stop_grace=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(ContainerHandle, "_has_started", away)
        patch.setattr(ContainerHandle, "_wait_for_output", nothing)
        async with owned(workers, docker, job) as (runner, order), api(docker):
            with pytest.raises(EngineUnreachable):
                await runner.start(order, yes)
            (left,) = waits
            assert all(task.cancelling() for task in left._tasks)
    await workers.store.jobs.cancel(job.id)
    async with workers.worker():
        await workers.ended(job, Status.CANCELLED)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    info = Engine.info

    async def with_one_processor(self: Engine) -> EngineInfo:
        return msgspec.structs.replace(await info(self), processors=1)

    monkeypatch.setattr(Engine, "info", with_one_processor)
    monkeypatch.setattr(docker_runner, "STARTS", 1)


@pytest.mark.usefixtures("docker", "one_at_a_time")
async def test_wait_for_a_start_slot_does_not_make_a_start_late(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R2, C1. Many starts at once would each take longer than a lease; waiting for a slot does not."""
    left: dict[str, float] = {}
    slow, starting = asyncio.Event(), asyncio.Event()
    begin, start = DockerRunner.start, Engine.start

    async def noted(self: DockerRunner, order: StartRequest, confirm: ConfirmLease) -> ContainerHandle:
        left[order.identity.job] = order.start_by - boottime()
        return await begin(self, order, confirm)

    async def slowly(self: Engine, name: str) -> None:
        starting.set()
        await slow.wait()
        await start(self, name)

    monkeypatch.setattr(DockerRunner, "start", noted)
    monkeypatch.setattr(Engine, "start", slowly)
    async with workers.worker():
        first = await workers.container("echo first")
        await starting.wait()
        later = [await workers.container("echo later") for _ in range(3)]
        unwanted = await workers.container("echo unwanted")

        async def claimed() -> bool:
            return {(await workers.get(job)).status for job in [*later, unwanted]} == {Status.RUNNING}

        await eventually(claimed, "all are claimed")
        await workers.store.jobs.cancel(unwanted.id)
        await asyncio.sleep(workers.settings.lease_ttl)  # Reason: a start within the first lease is too late now.
        assert list(left) == [first.id]
        slow.set()
        assert (await workers.ended(unwanted, Status.CANCELLED)).attempts == 0
        for job in later:
            assert (await workers.ended(job, Status.SUCCEEDED)).attempts == 1
        await workers.ended(first)
    assert left.keys() == {job.id for job in [first, *later]}
    assert min(left.values()) > 0


@pytest.mark.usefixtures("docker", "one_at_a_time")
async def test_container_that_does_not_begin_releases_its_start_slot(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R2. For its engine it has started."""
    stalled, awake = asyncio.Event(), asyncio.Event()
    begun = ContainerHandle.wait_until_begun

    async def late(self: ContainerHandle) -> None:
        if not stalled.is_set():
            stalled.set()
            await awake.wait()
        await begun(self)

    monkeypatch.setattr(ContainerHandle, "wait_until_begun", late)
    async with workers.worker():
        first = await workers.container("echo first")
        await stalled.wait()
        await workers.ended(await workers.container("echo second"), Status.SUCCEEDED)
        awake.set()
        await workers.ended(first, Status.SUCCEEDED)


@pytest.mark.usefixtures("one_at_a_time")
async def test_two_starts_of_one_attempt_neither_lose_nor_add_a_slot(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """A worker may adopt what it has lost while its own start of it still hangs in the engine."""
    job = await workers.container("sleep 600", stop_grace=0.1)
    async with owned(workers, docker, job) as (runner, order):

        async def start() -> None:
            async with runner.start_slot():
                (await runner.start(order, yes)).close()

        async with asyncio.timeout(60):
            await asyncio.gather(*(start() for _ in range(3)))
            async with runner.start_slot():
                assert runner._start_slots._free.locked()
        assert not runner._start_slots._free.locked()
    await workers.store.jobs.cancel(job.id)
    async with workers.worker():
        await workers.ended(job, Status.CANCELLED)
