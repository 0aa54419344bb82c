"""The ends of containers, learnt from the engine's events: a stream that breaks off or falls silent hides no end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from holdfast.model import Job, Status
from holdfast.runner.base import EngineUnreachable
from holdfast.runner.docker import container, container_log
from holdfast.runner.docker.container import ContainerHandle
from holdfast.runner.docker.container_log import ContainerLog
from holdfast.runner.docker.engine import Engine, EngineError
from holdfast.runner.docker.engine_events import EngineEvents
from holdfast.runner.docker.engine_watch import EngineWatch
from holdfast.runner.docker.runner import DockerRunner
from holdfast.worker.worker import Worker
from tests.support.docker_engine import DockerEngine
from tests.support.in_process_workers import InProcessWorkers, eventually

WAITING = "echo up; while [ ! -e go ]; do sleep 0.1; done; echo gone"
NEVER = 3600.0


@pytest.fixture
def kind() -> str:
    """One store is enough: containers do not depend on it."""
    return "sqlite"


@pytest.fixture(autouse=True)
def no_other_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual inspection, once a minute, would hide that an end was missed."""
    monkeypatch.setattr(container, "WAIT_SECONDS", NEVER)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The containers for which the engine was asked to wait."""
    asked: list[str] = []
    wait = Engine.wait

    async def noted(self: Engine, container: str) -> None:
        asked.append(container)
        await wait(self, container)

    monkeypatch.setattr(Engine, "wait", noted)
    return asked


@pytest.fixture
def deaf_to_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a log says that a container may have ended, too."""
    monkeypatch.setattr(ContainerHandle, "_log_broke_off", lambda self: None)


async def listening(worker: Worker) -> None:
    runner = worker.capabilities.runners["docker"]
    assert isinstance(runner, DockerRunner)

    async def look() -> bool:
        return runner.events.open

    await eventually(look, "the worker follows the engine's events")


@asynccontextmanager
async def running(workers: InProcessWorkers) -> AsyncIterator[Job]:
    """A job that waits in its container, of a worker that follows the engine's events."""
    async with workers.worker() as worker:
        await listening(worker)
        job = await workers.container(WAITING)
        await workers.wait_for_log(job, "up")
        yield job
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, await workers.log(job)) == (1, ["up", "gone"])


def let_end(docker: DockerEngine) -> None:
    (name,) = docker.containers()
    docker.docker("exec", "-u", "65532", name, "touch", "/holdfast/attempt/work/go")


@pytest.mark.usefixtures("deaf_to_logs")
async def test_end_is_learnt_from_the_stream_alone(
    workers: InProcessWorkers, docker: DockerEngine, waits: list[str]
) -> None:
    """Proves R5. One stream for all containers: none has a call of its own."""
    async with running(workers):
        let_end(docker)
    assert waits == []


@pytest.mark.usefixtures("deaf_to_logs")
async def test_end_while_the_stream_is_cut_is_found(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch, waits: list[str]
) -> None:
    """Proves R5. Nothing tells of this end: the stream lost it, and breaks off later."""
    cut = asyncio.Event()
    exits = Engine.exits

    async def lossy(self: Engine, label: str, since: float) -> AsyncGenerator[str | None, None]:
        if cut.is_set():
            async for one in exits(self, label, since):
                yield one
        else:
            yield None
            await cut.wait()
            raise EngineUnreachable("cut")

    monkeypatch.setattr(Engine, "exits", lossy)
    async with running(workers) as job:
        let_end(docker)
        name = await over(docker)
        assert (await workers.get(job)).status is Status.RUNNING, name
        cut.set()


async def over(docker: DockerEngine) -> str:
    """Wait until the engine itself has seen the end of the one container."""

    async def exited() -> bool:
        return docker.docker("ps", "-q") == ""

    await eventually(exited, "it has ended")
    return docker.containers()[0]


async def test_silent_stream_hides_no_end(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R5. As behind a firewall that drops idle connections: the end of the log tells instead."""

    async def silent(self: Engine, label: str, since: float) -> AsyncGenerator[str | None, None]:
        yield None
        await asyncio.Event().wait()

    monkeypatch.setattr(Engine, "exits", silent)
    async with running(workers):
        let_end(docker)


async def test_without_a_stream_each_container_is_waited_for(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch, waits: list[str]
) -> None:
    """Proves R5. A proxy before an engine may refuse its events."""
    refused = asyncio.Event()

    async def refuses(self: Engine, label: str, since: float) -> AsyncGenerator[str | None, None]:
        refused.set()
        for error in [EngineError(403, "events are not for you")]:
            raise error
        yield None

    monkeypatch.setattr(Engine, "exits", refuses)
    async with workers.worker():
        await refused.wait()
        job = await workers.container(WAITING)
        await workers.wait_for_log(job, "up")
        let_end(docker)
        await workers.ended(job, Status.SUCCEEDED)
    assert waits


class FakeEngine:
    """Yields what a test puts in."""

    host = "unix:///nowhere"

    def __init__(self) -> None:
        self.said: asyncio.Queue[str | None] = asyncio.Queue()
        self.since: list[float] = []

    async def exits(self, label: str, since: float) -> AsyncGenerator[str | None, None]:
        self.since.append(since)
        while (one := await self.said.get()) != "cut":
            yield one
        raise EngineUnreachable("cut")


async def test_only_those_who_wait_for_it_hear_of_an_end_and_all_of_a_cut() -> None:
    """Also two executions of one attempt."""
    engine: Any = FakeEngine()
    events = EngineEvents(engine, EngineWatch(engine), "a=b")
    following = asyncio.create_task(events.follow())
    assert events.watch("one") is None
    engine.said.put_nowait(None)

    async def is_open() -> bool:
        return events.open

    await eventually(is_open, "the stream is open")
    first, second, other = events.watch("one"), events.watch("one"), events.watch("other")
    assert first is not None
    assert second is not None
    assert other is not None
    engine.said.put_nowait("one")
    await asyncio.gather(first.wait(), second.wait())
    assert not other.is_set()
    engine.said.put_nowait("cut")
    await other.wait()
    assert not events.open
    for name, signal in (("one", first), ("one", second), ("other", other)):
        events.unwatch(name, signal)
    assert not events._signals
    engine.said.put_nowait(None)
    await eventually(is_open, "it is open again")
    assert len(engine.since) == 2
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


class SilentEngine:
    """Has the lines of a log that a test puts in, and then is silent."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bytes]] = []
        self.requests: list[str] = []

    async def log(self, container: str, *, since: str) -> AsyncGenerator[tuple[str, bytes], None]:
        self.requests.append(since)
        for line in self.lines:
            yield line
        await asyncio.Event().wait()


async def test_log_of_a_silent_container_is_requested_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last known line, which every request repeats, is nothing new."""
    monkeypatch.setattr(container_log, "STALL_SECONDS", 0.01)
    engine = SilentEngine()
    runner: Any = SimpleNamespace(engine=engine)
    log = ContainerLog(
        runner, "one", stdout=0, stderr=0, ended=asyncio.Event(), exists=lambda: True,
        read_exit=AsyncMock(), on_event=lambda _: None, on_end=lambda: None,
    )  # fmt: skip
    engine.lines = [("2026-01-01T00:00:00.000000001Z", b"no frame")]
    seen = []
    for _ in range(6):
        assert await log._follow()
        seen.append(log._patience)
    assert seen == [0.02, 0.04, 0.08, 0.08, 0.08, 0.08]
    assert engine.requests == ["", *["1767225600.000000001"] * 5]
    engine.lines.append(("2026-01-01T00:00:00.000000002Z", b"no frame"))
    assert await log._follow()
    assert log._patience == 0.02
