"""Pipelines in containers, with a real engine: files, and a Postgres beside the tasks in the same container."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Job, Status
from tests.support.crashing_worker import Hook
from tests.support.docker_engine import IMAGE, DockerEngine
from tests.support.in_process_workers import InProcessWorkers
from tests.support.pipelines import Pipelines, expected, left_by
from tests.support.postgres_image import NAME, image
from tests.support.worker_processes import WorkerProcesses

SCHEMA = "CREATE TABLE fruit (id integer PRIMARY KEY, name text NOT NULL);\n"
SLOW: Any = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}
SEED = "INSERT INTO fruit SELECT n, 'fruit ' || n FROM generate_series(1, 1000) AS n;\n"


@pytest.fixture(scope="session")
def postgres_image(docker_engine: DockerEngine) -> str:
    docker_engine.docker("import", "-", NAME, stdin=image())
    return NAME


@pytest.fixture
def kind() -> str:
    """A container knows nothing of the store; a server beside processes runs on the other one."""
    return "postgres"


@pytest.fixture
def pipelines(workers: InProcessWorkers, docker: DockerEngine, tmp_path: Path) -> Pipelines:
    return with_sql(workers, tmp_path)


def with_sql(workers: InProcessWorkers, folder: Path) -> Pipelines:
    pipelines = Pipelines(workers, folder)
    (pipelines.inputs / "schema.sql").write_text(SCHEMA)
    (pipelines.inputs / "seed.sql").write_text(SEED)
    return pipelines


async def submit(
    pipelines: Pipelines,
    *tasks: dict[str, Any],
    image: str = IMAGE,
    env: Mapping[str, str] | None = None,
    **fields: Any,
) -> Job:
    spec = {"image": image, "env": env or {}}
    return await pipelines.workers.store.jobs.submit({"runner": "docker", "spec": spec, "tasks": list(tasks), **fields})


def sh(name: str, script: str) -> dict[str, Any]:
    return {"name": name, "command": ["sh", "-ec", script]}


STEPS: list[dict[str, Any]] = [{"name": "schema", "sql": "schema.sql"}, {"name": "seed", "sql": "seed.sql"}]
ASKS = sh("ask", 'psql -X -At -c "SELECT count(*), sum(id) FROM fruit"')


async def test_tasks_share_a_container_and_its_results_are_known_later(
    pipelines: Pipelines, docker: DockerEngine
) -> None:
    """Proves P1, P2, P4, P7: one container, non-root, and none at all for what is known."""
    workers = pipelines.workers
    tasks = [sh("one", "id -u; hostname > /tmp/host; echo one > made"), sh("two", "cat /tmp/host; echo two >> made")]
    async with workers.worker():
        with docker.recorded() as record:
            job = await workers.ended(await submit(pipelines, *tasks), Status.SUCCEEDED)
            again = await workers.ended(await submit(pipelines, *tasks), Status.SUCCEEDED)
            more = await workers.ended(await submit(pipelines, *tasks, sh("three", "cat made")), Status.SUCCEEDED)
    assert (await workers.log(job))[0] == "65532"
    assert (record.runs(job.id), record.runs(again.id), record.runs(more.id)) == (1, 0, 1)
    assert await pipelines.statuses(again) == ["cached", "cached"]
    assert await workers.log(more) == ["one", "two"]
    assert await pipelines.content("two") == "one\ntwo\n"
    assert list((workers.settings.state / "spaces").glob("*/*")) == []


async def test_a_pipeline_mounts_its_workspace_and_nothing_else_of_the_host(
    pipelines: Pipelines, docker: DockerEngine
) -> None:
    """As docs/docker.md says."""
    workers = pipelines.workers
    job = await submit(pipelines, sh("wait", "echo up; while [ ! -e go ]; do sleep 0.1; done"))
    async with workers.worker():
        await workers.wait_for_log(job, "up")
        (name,) = [name for name in docker.containers() if job.id in name]
        own, space = sorted(
            json.loads(docker.docker("inspect", name))[0]["Mounts"], key=lambda mount: mount["Destination"]
        )
        assert (own["Type"], own["Destination"]) == ("volume", "/holdfast")
        assert (space["Type"], space["Destination"]) == ("bind", "/holdfast/attempt/space")
        folder = Path(space["Source"])
        assert folder.match(f"{workers.settings.state}/spaces/*/{job.id}.1/*/space")
        (folder / "tree" / "go").touch()
        await workers.ended(job, Status.SUCCEEDED)
    assert list((workers.settings.state / "spaces").glob("*/*")) == []


async def test_postgres_in_the_container_is_snapshotted_and_continues(
    pipelines: Pipelines, docker: DockerEngine, postgres_image: str
) -> None:
    """Proves P8: stopped, copied and started again in a container that stays up; the restored rows are the same."""
    workers = pipelines.workers
    async with workers.worker():
        with docker.recorded() as record:
            job = await submit(pipelines, *STEPS, image=postgres_image, connector="postgres")
            job = await workers.ended(job)
            assert job.status is Status.SUCCEEDED, (job.error, await workers.log(job, "stderr"))
            more = await submit(pipelines, *STEPS, ASKS, image=postgres_image, connector="postgres")
            await workers.ended(more, Status.SUCCEEDED)
    assert record.runs(job.id) == 1
    assert await pipelines.statuses(job) == ["succeeded", "succeeded"]
    assert await pipelines.statuses(more) == ["cached", "cached", "succeeded"]
    assert await workers.log(more) == ["1000|500500"]


@pytest.mark.parametrize(("mode", "ran"), [("always", 1), ("none", 2)])
async def test_lost_container_continues_after_the_latest_snapshot(
    pipelines: Pipelines, docker: DockerEngine, mode: str, ran: int
) -> None:
    """Proves P2, P7: its container is removed in the middle of a task; what was not kept runs again."""
    workers = pipelines.workers
    waits = sh("two", "echo here; cat made; if [ $HOLDFAST_ATTEMPT = 1 ]; then sleep 600; fi; echo two >> made")
    async with workers.worker():
        job = await submit(
            pipelines, sh("one", "echo ran; echo one > made"), waits, sh("three", "cat made"), snapshot=mode,
            max_attempts=2, retry={"base": 0, "cap": 0},
        )  # fmt: skip
        await workers.wait_for_log(job, "here")
        docker.docker("rm", "-fv", *docker.containers())
        await workers.ended(job, Status.SUCCEEDED)
    assert (await workers.log(job)).count("ran") == ran
    assert (await workers.log(job))[-2:] == ["one", "two"]
    assert len(await pipelines.snapshots()) == (3 if mode == "always" else 0)
    assert list((workers.settings.state / "spaces").glob("*/*")) == []


BRINGS = """cd "$HOLDFAST_WORK_DIR"; echo NAME > output/NAME; echo NAME > output/last; """
BRINGS += """printf '{"version": 1, "result": "NAME"}' > result.json; cd "$HOLDFAST_WORKSPACE"; """


def brings(name: str, script: str = "") -> dict[str, Any]:
    """A task that leaves two files and a result."""
    return sh(name, BRINGS.replace("NAME", name) + script)


@pytest.mark.parametrize("mode", ["always", "final", "none"])
async def test_second_run_gives_the_result_and_artifacts_of_the_first(
    pipelines: Pipelines, docker: DockerEngine, mode: str
) -> None:
    """Proves D1: also where a part of it comes from the cache."""
    workers = pipelines.workers
    tasks = [brings("one"), brings("two")]
    async with workers.worker():
        with docker.recorded() as record:
            first = await workers.ended(await submit(pipelines, *tasks, snapshot=mode), Status.SUCCEEDED)
            again = await workers.ended(await submit(pipelines, *tasks, snapshot=mode), Status.SUCCEEDED)
            more = await workers.ended(
                await submit(pipelines, *tasks, sh("three", "cat made || true")), Status.SUCCEEDED
            )
    assert (record.runs(first.id), record.runs(again.id), record.runs(more.id)) == (1, int(mode == "none"), 1)
    for job in (first, again, more):
        assert await left_by(workers, job) == ("two", expected(one="one", two="two", last="two"))


async def test_lost_container_takes_nothing_from_the_tasks_before(pipelines: Pipelines, docker: DockerEngine) -> None:
    """Proves D2."""
    workers = pipelines.workers
    waits = sh("two", "echo here; if [ $HOLDFAST_ATTEMPT = 1 ]; then sleep 600; fi")
    async with workers.worker():
        job = await submit(pipelines, brings("one", "echo ran"), waits, max_attempts=2, retry={"base": 0, "cap": 0})
        await workers.wait_for_log(job, "here")
        docker.docker("rm", "-fv", *docker.containers())
        await workers.ended(job, Status.SUCCEEDED)
    assert (await workers.log(job)).count("ran") == 1
    assert await left_by(workers, job) == ("one", expected(one="one", last="one"))


DYING = ["serving", "quiet", "copy", "copied"]
"""Around a snapshot: the server stops, its folder is copied, the row is written, the server starts again."""


async def test_worker_killed_in_a_snapshot_is_followed_by_another(
    processes: WorkerProcesses, docker_for_processes: DockerEngine, postgres_image: str, tmp_path: Path
) -> None:
    """Proves P2, P6, P8: the container and what is in it go on; no task runs twice, which its SQL would not survive."""
    pipelines = with_sql(processes, tmp_path)
    jobs = {
        step: await submit(
            pipelines, *STEPS, ASKS, image=postgres_image, connector="postgres", queue=step, env={"OF": step}
        )
        for step in DYING
    }
    with docker_for_processes.recorded() as record:
        victims = [
            processes.start({step: 1}, Hook(step=step, do="kill", job=job.id), adopts=False, **SLOW)
            for step, job in jobs.items()
        ]
        for victim in victims:
            assert await victim.dead() == -signal.SIGKILL, victim.log
        processes.start({"other": len(DYING)}, **SLOW)
        for step, job in jobs.items():
            ended = await processes.ended(job)
            assert ended.status is Status.SUCCEEDED, (step, ended.error, await processes.log(job, "stderr"))
            assert (step, await processes.log(job)) == (step, ["CREATE TABLE", "INSERT 0 1000", "1000|500500"])
            assert (step, await pipelines.statuses(job), ended.attempts) == (step, ["succeeded"] * 3, 1)
            await processes.assert_true(job)
    assert {step: record.runs(job.id) for step, job in jobs.items()} == dict.fromkeys(DYING, 1)
    assert len(await pipelines.snapshots()) == 3 * len(DYING)


async def test_worker_killed_in_a_task_is_followed_by_another(
    processes: WorkerProcesses, docker_for_processes: DockerEngine, postgres_image: str, tmp_path: Path
) -> None:
    """Proves P2, P8: the task that runs is adopted, beside its server."""
    pipelines = with_sql(processes, tmp_path)
    waits = sh(
        "wait", 'echo here; until [ -e gate ]; do sleep 0.05; done; psql -X -c "INSERT INTO fruit VALUES (0, 0)"'
    )
    job = await submit(pipelines, *STEPS, waits, ASKS, image=postgres_image, connector="postgres")
    with docker_for_processes.recorded() as record:
        victim = processes.start({"default": 1}, **SLOW)
        await processes.wait_for_log(job, "here")
        victim.kill()
        processes.start({"other": 1}, **SLOW)
        (tree,) = processes.folder.rglob("space/tree")
        (tree / "gate").touch()
        ended = await processes.ended(job, Status.SUCCEEDED)
    assert (record.runs(job.id), ended.attempts) == (1, 1)
    assert (await processes.log(job))[2:] == ["here", "INSERT 0 1", "1001|500500"]
    assert await pipelines.statuses(job) == ["succeeded"] * 4
    assert await processes.leases(job, "adopted") == ["adopted"]


async def test_task_cannot_give_its_adopter_another_plan(
    processes: WorkerProcesses, docker_for_processes: DockerEngine, tmp_path: Path
) -> None:
    """Proves P2, P5: what is mounted belongs to the task; an adopter reads nothing there, and does not wait."""
    pipelines = with_sql(processes, tmp_path)
    forges = sh("one", "cd ..; rm -f plan; mkfifo plan; echo here; until [ -e tree/gate ]; do sleep 0.05; done")
    job = await submit(pipelines, forges, sh("two", "echo two > made"))
    victim = processes.start({"default": 1}, **SLOW)
    await processes.wait_for_log(job, "here")
    planned = {record.snapshot for record in await pipelines.tasks(job)}
    victim.kill()
    processes.start({"other": 1}, **SLOW)
    (tree,) = processes.folder.rglob("space/tree")
    (tree / "gate").touch()
    ended = await processes.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, await pipelines.content("two")) == (1, "two\n")
    assert {snapshot.id for snapshot in await pipelines.snapshots()} == planned


async def test_tag_that_does_not_resolve_fails_the_job_clearly(pipelines: Pipelines, docker: DockerEngine) -> None:
    """Proves P3, R17: the worker's engine has the last word on it; nothing runs, and nothing is published."""
    workers = pipelines.workers
    async with workers.worker():
        job = await submit(pipelines, sh("one", "echo one > made"), image="nowhere:0", max_attempts=3)
        job = await workers.ended(job, Status.FAILED)
    assert job.error is not None
    assert job.error.code == "image_missing"
    assert job.error.message.startswith("there is no image nowhere:0 on the Docker engine at unix://")
    assert job.error.message.endswith(": pull or build it there")
    assert (await pipelines.snapshots(), docker.containers()) == ([], [])


async def test_remote_engine_is_refused_clearly(pipelines: Pipelines, docker: DockerEngine) -> None:
    """Proves R17: a workspace is a folder of this host. The engine is reached over TCP, as one elsewhere would be."""
    workers = pipelines.workers
    async with over_tcp(docker) as host:
        workers.set(docker_host=host)
        async with workers.worker():
            job = await workers.ended(await submit(pipelines, sh("one", "true"), max_attempts=3), Status.FAILED)
    assert job.error is not None
    assert job.error.message.startswith("a pipeline's workspace is a folder that is mounted into its container")
    assert await pipelines.snapshots() == []


@asynccontextmanager
async def over_tcp(docker: DockerEngine) -> AsyncIterator[str]:
    """A port of this machine that leads to the engine's socket."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(docker.socket)
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
