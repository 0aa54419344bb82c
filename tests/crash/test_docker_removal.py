"""A worker that is killed after the end of jobs is recorded, and before their containers are removed."""

import signal

import pytest

from holdfast.model import Status
from holdfast.runner.docker import runner as docker_runner
from tests.crash.test_docker_adoption import SLOW, sweep
from tests.support.crashing_worker import Hook
from tests.support.docker_engine import DockerEngine
from tests.support.worker_processes import WorkerProcesses


async def test_containers_of_a_worker_killed_before_their_removal_are_swept(
    processes: WorkerProcesses, docker_for_processes: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R16: each ended once, and nothing of them is left after two sweeps; a running one is kept."""
    docker = docker_for_processes
    ended = [await processes.container("echo done", queue=f"victim-{n}") for n in range(3)]
    victims = [
        processes.start({job.queue: 1}, Hook(step="finished", do="kill", job=job.id), adopts=False, **SLOW)
        for job in ended
    ]
    for victim in victims:
        assert await victim.dead() == -signal.SIGKILL
    needed = await processes.container("echo up; sleep 600", queue="other", stop_grace=0.1)
    processes.start({"other": 1}, **SLOW)
    await processes.wait_for_log(needed, "up")
    assert (len(docker.containers()), len(docker.volumes())) == (4, 4)
    monkeypatch.setattr(docker_runner, "GRACE_SECONDS", -1.0)
    await sweep(processes, docker, 2)
    (left,) = docker.containers()
    assert needed.id in left
    assert len(docker.volumes()) == 1
    for job in ended:
        assert (await processes.ended(job, Status.SUCCEEDED)).attempts == 1
        assert await processes.log(job) == ["done"]
    await processes.store.jobs.cancel(needed.id)
    await processes.ended(needed, Status.CANCELLED)
