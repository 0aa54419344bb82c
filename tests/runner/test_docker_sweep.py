"""The sweep of an engine: leftovers of this installation are removed after a while, and nothing else."""

import logging
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.model import Status
from holdfast.runner.base import ContainerLimits, Identity
from holdfast.runner.docker import runner as docker_runner
from holdfast.runner.docker.container_config import INSTALLATION as LABEL
from holdfast.runner.docker.container_config import JOB, NUMBER, name_of
from holdfast.runner.docker.runner import DockerRunner
from holdfast.runner.state_folder import StateFolder
from holdfast.store.migrate import migrate
from holdfast.store.store import Store, connect
from holdfast.worker import upkeep
from holdfast.worker.upkeep import Upkeep
from tests.support.docker_engine import IMAGE, DockerEngine, api
from tests.support.in_process_workers import InProcessWorkers, eventually


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_runner, "GRACE_SECONDS", -10.0)
    monkeypatch.setattr(upkeep, "INCOMPLETE_SECONDS", -10.0)


@pytest.fixture
async def sweeper(workers: InProcessWorkers, docker: DockerEngine) -> AsyncIterator[Upkeep]:
    async with api(docker) as engine:
        yield await upkeep_of(workers, engine)


async def upkeep_of(workers: InProcessWorkers, engine: object) -> Upkeep:
    installation = await workers.store.installation()
    state = workers.settings.state
    runner = DockerRunner(engine, installation, limits=ContainerLimits(), log_cap=1 << 20, state=state)  # type: ignore[arg-type]
    await runner.check()
    locks = StateFolder(state).locks(installation)
    return Upkeep(workers.store, "sweeper", workers.settings, locks=locks, runners=[runner], held=lambda _: False)


def make(docker: DockerEngine, installation: str, *, start: bool = False) -> str:
    """Make a container as a worker of an installation would, of a job that its database does not know."""
    identity = Identity(installation, str(uuid.uuid4()), 1)
    labels = {LABEL: installation, JOB: identity.job, NUMBER: "1"}
    options = [word for label, value in labels.items() for word in ("--label", f"{label}={value}")]
    name = name_of(identity)
    docker.docker("run" if start else "create", *(["-d"] if start else []), "--name", name, *options, IMAGE, "true")
    return name


async def test_sweep_removes_leftovers_and_keeps_foreign_and_needed_containers(
    workers: InProcessWorkers, docker: DockerEngine, sweeper: Upkeep
) -> None:
    """Nothing goes at the first look. Proves R16, R1."""
    own = await workers.store.installation()
    leftovers = {make(docker, own), make(docker, own, start=True)}
    other = make(docker, "f" * 32)
    docker.docker("create", "--name", "somebodys", IMAGE, "true")
    docker.docker("volume", "create", "somebodys")
    docker.docker("volume", "create", "--label", f"{LABEL}={'f' * 32}", "of-another")
    docker.docker("volume", "create", "--label", f"{LABEL}={own}", "loose")
    job = await workers.container("echo up; while [ ! -e go ]; do sleep 0.1; done")
    async with workers.worker():
        await workers.wait_for_log(job, "up")
        (needed,) = [name for name in docker.containers() if job.id in name]
        await sweeper.sweep()
        assert "loose" not in docker.volumes(), "a volume without an owner, swept by the first worker"
        assert set(docker.containers()) == {*leftovers, other, "somebodys", needed}
        assert await sweeper.sweep() == 2
        assert await sweeper.sweep() == 0
        assert set(docker.containers()) == {other, "somebodys", needed}
        docker.docker("exec", "-u", "65532", needed, "touch", "/holdfast/attempt/work/go")
        await workers.ended(job, Status.SUCCEEDED)
    assert {"somebodys", "of-another"} == set(docker.volumes())
    assert docker.containers() == [other, "somebodys"]
    docker.clear()


async def test_sweep_keeps_a_young_leftover(
    workers: InProcessWorkers, docker: DockerEngine, sweeper: Upkeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R16."""
    monkeypatch.setattr(docker_runner, "GRACE_SECONDS", 300.0)
    name = make(docker, await workers.store.installation())
    for _ in range(3):
        assert await sweeper.sweep() == 0
    assert docker.containers() == [name]
    docker.clear()


async def test_an_unusual_share_stops_the_sweep(
    workers: InProcessWorkers, docker: DockerEngine, sweeper: Upkeep, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a database was restored from an old copy. Proves R16."""
    own = await workers.store.installation()
    names = [make(docker, own) for _ in range(docker_runner.FEW + 1)]
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert await sweeper.sweep() == 0
    assert "11 of 11 containers of this installation" in caplog.text
    assert docker.containers() == sorted(names)
    docker.docker("rm", names[0])
    assert await sweeper.sweep() == docker_runner.FEW


async def test_a_container_that_runs_although_its_job_moved_on_is_stopped(
    workers: InProcessWorkers, docker: DockerEngine, sweeper: Upkeep
) -> None:
    """A person said that it had stopped, but it had not. Proves R16, R6."""
    job = await workers.container("echo up; sleep 600", stop_grace=0.2)
    async with workers.worker():
        await workers.wait_for_log(job, "up")
    domain = (await workers.store.attempts.list(job.id))[0].domain
    assert domain is not None
    await workers.store.workers.lost(domain)
    assert (await workers.get(job)).status is Status.FAILED
    assert docker.docker("ps", "-q") != ""

    async def gone() -> bool:
        await sweeper.sweep()
        return docker.containers() == []

    await eventually(gone, "it is stopped and removed")


async def test_two_installations_on_one_engine_are_independent(
    workers: InProcessWorkers, docker: DockerEngine, tmp_path: Path
) -> None:
    """Neither adopts or sweeps a container of the other one, not even for the same job id. Proves R1, R16."""
    url = f"sqlite:///{tmp_path / 'other.db'}"
    database = await connect(url)
    await migrate(database)
    async with Store(database) as store:
        other = InProcessWorkers(url, tmp_path / "other", store)
        other.set(docker_host=docker.host)
        script = "echo $HOLDFAST_MARK; echo up; while [ ! -e go ]; do sleep 0.1; done"
        job_id = str(uuid.uuid4())
        jobs = [(one, await one.container(script, id=job_id)) for one in (workers, other)]
        async with api(docker) as engine:
            sweepers = [await upkeep_of(one, engine) for one in (workers, other)]
            async with workers.worker(), other.worker():
                for one, job in jobs:
                    await one.wait_for_log(job, "up")
                for sweeper in sweepers * 3:
                    assert await sweeper.sweep() == 0
                assert len(docker.containers()) == 2
                for name in docker.containers():
                    docker.docker("exec", "-u", "65532", name, "touch", "/holdfast/attempt/work/go")
                for one, job in jobs:
                    await one.ended(job, Status.SUCCEEDED)
                    assert await one.log(job) == [f"{await one.store.installation()}/{job.id}/1", "up"]
