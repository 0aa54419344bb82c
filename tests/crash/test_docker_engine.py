"""A Docker engine outage: during running jobs, during claims, in the middle of a start."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Cause, Job, Lease, Status, WorkerRecord
from tests.support.docker_engine import DockerEngine
from tests.support.in_process_workers import InProcessWorkers, eventually

ONE = "own=$(cat /proc/sys/kernel/random/uuid); echo $own; echo up"
"""A run has a name of its own, said first and last: one that was run again would end with another."""
SLOW = f"{ONE}; n=0; while [ $n -lt $COUNT ]; do n=$((n + 1)); echo line $n; sleep 0.1; done; echo $own"
WAITING = f"{ONE}; while [ ! -e go ]; do sleep 0.1; done; echo gone; echo $own"


async def slow(workers: InProcessWorkers, count: int, **fields: Any) -> Job:
    return await workers.container(SLOW, env={"COUNT": str(count)}, **fields)


async def assert_one_run(workers: InProcessWorkers, job: Job, *lines: str) -> None:
    ended = await workers.ended(job, Status.SUCCEEDED)
    log = await workers.log(job)
    assert log[0] == log[-1]
    assert log[1:-1] == ["up", *lines]
    assert (ended.attempts, ended.attempt) == (1, 1)


def count(n: int) -> list[str]:
    return [f"line {i}" for i in range(1, n + 1)]


async def worker_row(workers: InProcessWorkers, fits: Callable[[WorkerRecord], bool], what: str) -> None:
    async def look() -> bool:
        return any(fits(worker) for worker in await workers.store.workers.list())

    await eventually(look, what)


async def in_thread(work: Callable[..., object], *arguments: object) -> None:
    await asyncio.to_thread(work, *arguments)


@pytest.fixture(params=["stopped", "killed"])
def down(request: pytest.FixtureRequest) -> Callable[[DockerEngine], None]:
    """How the engine ends."""
    return DockerEngine.stop if request.param == "stopped" else DockerEngine.kill


async def test_engine_outage_fails_no_job(
    workers: InProcessWorkers, docker: DockerEngine, down: Callable[[DockerEngine], None]
) -> None:
    """Running jobs continue or end; stop requests and claims wait. Proves R5, R3, R10."""
    async with workers.worker({"default": 16}):
        running = await slow(workers, 150)
        ending = await slow(workers, 30)
        doomed = await workers.container("echo up; sleep 600", stop_grace=0.2)
        for job in (running, ending, doomed):
            await workers.wait_for_log(job, "up")
        await in_thread(down, docker)
        await worker_row(workers, lambda row: "docker" not in row.capabilities, "the worker says that it is away")
        waiting = [await slow(workers, 1) for _ in range(3)]
        await workers.store.jobs.cancel(doomed.id)
        await asyncio.sleep(6)  # Reason: the outage itself, in which `ending` ends.
        assert [(await workers.get(job)).status for job in waiting] == [Status.QUEUED] * 3
        explained = await workers.store.explain.job(waiting[0].id)
        assert [reason.about for reason in explained.reasons] == ["worker"]
        assert f"the Docker engine at unix://{docker.socket}" in explained.reasons[0].message
        await in_thread(docker.start)
        await worker_row(workers, lambda row: "docker" in row.capabilities, "the worker says that it is back")
        for job in waiting:
            await assert_one_run(workers, job, *count(1))
        await workers.ended(doomed, Status.CANCELLED)
        await assert_one_run(workers, ending, *count(30))
        await assert_one_run(workers, running, *count(150))


@pytest.mark.parametrize("step", ["prepared", "created", "confirmed", "spawned"])
async def test_engine_outage_during_a_start_costs_no_attempt(
    workers: InProcessWorkers, docker: DockerEngine, step: str
) -> None:
    """Proves R5, R4, L13."""
    went = asyncio.Event()

    def at(name: str, _: Lease) -> None:
        if name == step and not went.is_set():
            docker.kill()
            went.set()

    job = await slow(workers, 20)
    async with workers.worker(at=at):
        await went.wait()
        await asyncio.sleep(1)  # Reason: time in which the start would wrongly be recorded as failed.
        assert (await workers.get(job)).status is Status.RUNNING
        await in_thread(docker.start)
        await assert_one_run(workers, job, *count(20))


async def test_orphan_waits_until_its_engine_is_back(workers: InProcessWorkers, docker: DockerEngine) -> None:
    """Proves R5, R6: a worker without the engine adopts nothing, and says what is missing."""
    job = await slow(workers, 100)
    async with workers.worker():
        await workers.wait_for_log(job, "up")
    await in_thread(docker.stop)
    async with workers.worker():
        await asyncio.sleep(2)  # Reason: time in which the worker would wrongly adopt it.
        assert (await workers.get(job)).lease is None
        reason = (await workers.store.explain.job(job.id)).reasons[0].message
        assert "docker:" in reason
        assert "no live worker reaches" in reason
        assert f"the Docker engine at unix://{docker.socket}" in reason
        await in_thread(docker.start)
        await assert_one_run(workers, job, *count(100))


@pytest.fixture
def switch(
    workers: InProcessWorkers, docker_engine: DockerEngine, brittle_engine: DockerEngine, tmp_path: Path
) -> Iterator[Callable[[DockerEngine], None]]:
    """A socket that leads to one engine or to the other, both with the same id in their keys."""
    socket = Path(f"{docker_engine.folder}.sock")

    def to(engine: DockerEngine) -> None:
        socket.unlink(missing_ok=True)
        socket.symlink_to(engine.socket)

    to(docker_engine)
    workers.set(docker_host=f"unix://{socket}")
    yield to
    socket.unlink()
    docker_engine.ensure()
    docker_engine.clear()
    brittle_engine.ensure()


async def test_another_engine_that_does_not_know_a_container_proves_nothing(
    workers: InProcessWorkers,
    docker_engine: DockerEngine,
    brittle_engine: DockerEngine,
    switch: Callable[[DockerEngine], None],
) -> None:
    """It does not know the container; the job is not recorded as lost. Proves R5, R6."""
    job = await slow(workers, 100)
    held = await workers.container(WAITING)
    async with workers.worker():
        await workers.wait_for_log(job, "up")
        await workers.wait_for_log(held, "up")
        await in_thread(docker_engine.stop)
        switch(brittle_engine)
        other = str(brittle_engine.folder)
        await worker_row(
            workers, lambda row: any(other in domain for domain in row.domains), "the worker sees the other"
        )
        here = await workers.container(ONE)
        await workers.ended(here, Status.SUCCEEDED)
        await asyncio.sleep(1)  # Reason: time in which the job would wrongly be recorded as lost.
        assert (await workers.get(job)).status is Status.RUNNING
        await in_thread(brittle_engine.stop)
        switch(docker_engine)
        await in_thread(docker_engine.start)
        (name,) = [name for name in docker_engine.containers() if held.id in name]
        docker_engine.docker("exec", "-u", "65532", name, "touch", "/holdfast/attempt/work/go")
        await assert_one_run(workers, held, "gone")
        await assert_one_run(workers, job, *count(100))


async def test_containers_that_die_with_their_engine_are_recorded_as_lost(
    workers: InProcessWorkers, brittle_engine: DockerEngine, down: Callable[[DockerEngine], None]
) -> None:
    """Without live-restore; `on_lost` decides. Proves R5, R22, L11."""
    workers.set(docker_host=brittle_engine.host)
    script = "echo attempt $HOLDFAST_ATTEMPT; [ $HOLDFAST_ATTEMPT = 2 ] || sleep 600"
    again = await workers.container(script, max_attempts=2, retry={"base": 0.01, "cap": 0.01})
    failing = await workers.container(script)
    held = await workers.container(script, on_lost="hold")
    async with workers.worker():
        for job in (again, failing, held):
            await workers.wait_for_log(job, "attempt 1")
        await in_thread(down, brittle_engine)
        await in_thread(brittle_engine.start)
        await workers.ended(again, Status.SUCCEEDED)
        ends = [await workers.ended(failing, Status.FAILED), await workers.ended(held, Status.PAUSED)]
    assert [end.error and end.error.code for end in ends] == ["lost", "lost"]
    assert all(end.error and "supervisor" in end.error.message for end in ends)
    first, second = await workers.store.attempts.list(again.id)
    assert (first.cause, second.cause) == (Cause.LOST, Cause.EXIT)
    assert await workers.log(again) == ["attempt 1", "attempt 2"]
    assert brittle_engine.docker("ps", "-q") == ""
    brittle_engine.clear()  # One whose end was known before the engine went is left to the sweep.
