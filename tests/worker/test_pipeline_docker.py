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
from tests.support.engine import IMAGE, Daemon
from tests.support.in_process_worker import Rig
from tests.support.pipelines import Pipes, expected, left_by
from tests.support.postgres_image import NAME, image
from tests.support.worker_processes import Fleet

SCHEMA = "CREATE TABLE fruit (id integer PRIMARY KEY, name text NOT NULL);\n"
SLOW: Any = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}
SEED = "INSERT INTO fruit SELECT n, 'fruit ' || n FROM generate_series(1, 1000) AS n;\n"


@pytest.fixture(scope="session")
def postgres_image(docker_engine: Daemon) -> str:
    docker_engine.docker("import", "-", NAME, stdin=image())
    return NAME


@pytest.fixture
def kind() -> str:
    """A container knows nothing of the store; a server beside processes runs on the other one."""
    return "postgres"


@pytest.fixture
def pipes(rig: Rig, dock: Daemon, tmp_path: Path) -> Pipes:
    return with_sql(rig, tmp_path)


def with_sql(rig: Rig, folder: Path) -> Pipes:
    pipes = Pipes(rig, folder)
    (pipes.inputs / "schema.sql").write_text(SCHEMA)
    (pipes.inputs / "seed.sql").write_text(SEED)
    return pipes


async def submit(
    pipes: Pipes, *tasks: dict[str, Any], image: str = IMAGE, env: Mapping[str, str] | None = None, **fields: Any
) -> Job:
    spec = {"image": image, "env": env or {}}
    return await pipes.rig.store.jobs.submit({"runner": "docker", "spec": spec, "tasks": list(tasks), **fields})


def sh(name: str, script: str) -> dict[str, Any]:
    return {"name": name, "command": ["sh", "-ec", script]}


STEPS: list[dict[str, Any]] = [{"name": "schema", "sql": "schema.sql"}, {"name": "seed", "sql": "seed.sql"}]
ASKS = sh("ask", 'psql -X -At -c "SELECT count(*), sum(id) FROM fruit"')


async def test_tasks_share_a_container_and_its_results_are_known_later(pipes: Pipes, dock: Daemon) -> None:
    """Proves P1, P2, P4, P7: one container, non-root, and none at all for what is known."""
    rig = pipes.rig
    tasks = [sh("one", "id -u; hostname > /tmp/host; echo one > made"), sh("two", "cat /tmp/host; echo two >> made")]
    async with rig.worker():
        with dock.recorded() as record:
            job = await rig.ended(await submit(pipes, *tasks), Status.SUCCEEDED)
            again = await rig.ended(await submit(pipes, *tasks), Status.SUCCEEDED)
            more = await rig.ended(await submit(pipes, *tasks, sh("three", "cat made")), Status.SUCCEEDED)
    assert (await rig.log(job))[0] == "65532"
    assert (record.runs(job.id), record.runs(again.id), record.runs(more.id)) == (1, 0, 1)
    assert await pipes.statuses(again) == ["cached", "cached"]
    assert await rig.log(more) == ["one", "two"]
    assert await pipes.content("two") == "one\ntwo\n"
    assert list((rig.settings.state / "spaces").glob("*/*")) == []


async def test_a_pipeline_mounts_its_workspace_and_nothing_else_of_the_host(pipes: Pipes, dock: Daemon) -> None:
    """As docs/docker.md says."""
    rig = pipes.rig
    job = await submit(pipes, sh("wait", "echo up; while [ ! -e go ]; do sleep 0.1; done"))
    async with rig.worker():
        await rig.says(job, "up")
        (name,) = [name for name in dock.containers() if job.id in name]
        own, space = sorted(
            json.loads(dock.docker("inspect", name))[0]["Mounts"], key=lambda mount: mount["Destination"]
        )
        assert (own["Type"], own["Destination"]) == ("volume", "/holdfast")
        assert (space["Type"], space["Destination"]) == ("bind", "/holdfast/attempt/space")
        folder = Path(space["Source"])
        assert folder.match(f"{rig.settings.state}/spaces/*/{job.id}.1/*/space")
        (folder / "tree" / "go").touch()
        await rig.ended(job, Status.SUCCEEDED)
    assert list((rig.settings.state / "spaces").glob("*/*")) == []


async def test_postgres_in_the_container_is_snapshot_and_goes_on(
    pipes: Pipes, dock: Daemon, postgres_image: str
) -> None:
    """Proves P8: stopped, copied and started again in a container that stays up; the restored rows are the same."""
    rig = pipes.rig
    async with rig.worker():
        with dock.recorded() as record:
            job = await submit(pipes, *STEPS, image=postgres_image, connector="postgres")
            job = await rig.ended(job)
            assert job.status is Status.SUCCEEDED, (job.error, await rig.log(job, "stderr"))
            more = await submit(pipes, *STEPS, ASKS, image=postgres_image, connector="postgres")
            await rig.ended(more, Status.SUCCEEDED)
    assert record.runs(job.id) == 1
    assert await pipes.statuses(job) == ["succeeded", "succeeded"]
    assert await pipes.statuses(more) == ["cached", "cached", "succeeded"]
    assert await rig.log(more) == ["1000|500500"]


@pytest.mark.parametrize(("mode", "ran"), [("always", 1), ("none", 2)])
async def test_lost_container_goes_on_behind_the_latest_snapshot(
    pipes: Pipes, dock: Daemon, mode: str, ran: int
) -> None:
    """Proves P2, P7: its container is removed in the middle of a task; what was not kept runs again."""
    rig = pipes.rig
    waits = sh("two", "echo here; cat made; if [ $HOLDFAST_ATTEMPT = 1 ]; then sleep 600; fi; echo two >> made")
    async with rig.worker():
        job = await submit(
            pipes, sh("one", "echo ran; echo one > made"), waits, sh("three", "cat made"), snapshot=mode,
            max_attempts=2, retry={"base": 0, "cap": 0},
        )  # fmt: skip
        await rig.says(job, "here")
        dock.docker("rm", "-fv", *dock.containers())
        await rig.ended(job, Status.SUCCEEDED)
    assert (await rig.log(job)).count("ran") == ran
    assert (await rig.log(job))[-2:] == ["one", "two"]
    assert len(await pipes.snapshots()) == (3 if mode == "always" else 0)
    assert list((rig.settings.state / "spaces").glob("*/*")) == []


BRINGS = """cd "$HOLDFAST_WORK_DIR"; echo NAME > output/NAME; echo NAME > output/last; """
BRINGS += """printf '{"version": 1, "result": "NAME"}' > result.json; cd "$HOLDFAST_WORKSPACE"; """


def brings(name: str, script: str = "") -> dict[str, Any]:
    """A task that leaves two files and a result."""
    return sh(name, BRINGS.replace("NAME", name) + script)


@pytest.mark.parametrize("mode", ["always", "final", "none"])
async def test_second_run_gives_the_result_and_artifacts_of_the_first(pipes: Pipes, dock: Daemon, mode: str) -> None:
    """Proves D1: also where a part of it comes from the cache."""
    rig = pipes.rig
    tasks = [brings("one"), brings("two")]
    async with rig.worker():
        with dock.recorded() as record:
            first = await rig.ended(await submit(pipes, *tasks, snapshot=mode), Status.SUCCEEDED)
            again = await rig.ended(await submit(pipes, *tasks, snapshot=mode), Status.SUCCEEDED)
            more = await rig.ended(await submit(pipes, *tasks, sh("three", "cat made || true")), Status.SUCCEEDED)
    assert (record.runs(first.id), record.runs(again.id), record.runs(more.id)) == (1, int(mode == "none"), 1)
    for job in (first, again, more):
        assert await left_by(rig, job) == ("two", expected(one="one", two="two", last="two"))


async def test_lost_container_takes_nothing_from_the_tasks_before(pipes: Pipes, dock: Daemon) -> None:
    """Proves D2."""
    rig = pipes.rig
    waits = sh("two", "echo here; if [ $HOLDFAST_ATTEMPT = 1 ]; then sleep 600; fi")
    async with rig.worker():
        job = await submit(pipes, brings("one", "echo ran"), waits, max_attempts=2, retry={"base": 0, "cap": 0})
        await rig.says(job, "here")
        dock.docker("rm", "-fv", *dock.containers())
        await rig.ended(job, Status.SUCCEEDED)
    assert (await rig.log(job)).count("ran") == 1
    assert await left_by(rig, job) == ("one", expected(one="one", last="one"))


DYING = ["serving", "quiet", "copy", "copied"]
"""Around a snapshot: the server stops, its folder is copied, the row is written, the server starts again."""


async def test_worker_killed_in_a_snapshot_is_followed_by_another(
    fleet: Fleet, fleet_dock: Daemon, postgres_image: str, tmp_path: Path
) -> None:
    """Proves P2, P6, P8: the container and what is in it go on; no task runs twice, which its SQL would not survive."""
    pipes = with_sql(fleet, tmp_path)
    jobs = {
        step: await submit(
            pipes, *STEPS, ASKS, image=postgres_image, connector="postgres", queue=step, env={"OF": step}
        )
        for step in DYING
    }
    with fleet_dock.recorded() as record:
        victims = [
            fleet.start({step: 1}, Hook(step=step, do="kill", job=job.id), adopts=False, **SLOW)
            for step, job in jobs.items()
        ]
        for victim in victims:
            assert await victim.dead() == -signal.SIGKILL, victim.log
        fleet.start({"other": len(DYING)}, **SLOW)
        for step, job in jobs.items():
            ended = await fleet.ended(job)
            assert ended.status is Status.SUCCEEDED, (step, ended.error, await fleet.log(job, "stderr"))
            assert (step, await fleet.log(job)) == (step, ["CREATE TABLE", "INSERT 0 1000", "1000|500500"])
            assert (step, await pipes.statuses(job), ended.attempts) == (step, ["succeeded"] * 3, 1)
            await fleet.assert_true(job)
    assert {step: record.runs(job.id) for step, job in jobs.items()} == dict.fromkeys(DYING, 1)
    assert len(await pipes.snapshots()) == 3 * len(DYING)


async def test_worker_killed_in_a_task_is_followed_by_another(
    fleet: Fleet, fleet_dock: Daemon, postgres_image: str, tmp_path: Path
) -> None:
    """Proves P2, P8: the task that runs is adopted, beside its server."""
    pipes = with_sql(fleet, tmp_path)
    waits = sh(
        "wait", 'echo here; until [ -e gate ]; do sleep 0.05; done; psql -X -c "INSERT INTO fruit VALUES (0, 0)"'
    )
    job = await submit(pipes, *STEPS, waits, ASKS, image=postgres_image, connector="postgres")
    with fleet_dock.recorded() as record:
        victim = fleet.start({"default": 1}, **SLOW)
        await fleet.says(job, "here")
        victim.kill()
        fleet.start({"other": 1}, **SLOW)
        (tree,) = fleet.folder.rglob("space/tree")
        (tree / "gate").touch()
        ended = await fleet.ended(job, Status.SUCCEEDED)
    assert (record.runs(job.id), ended.attempts) == (1, 1)
    assert (await fleet.log(job))[2:] == ["here", "INSERT 0 1", "1001|500500"]
    assert await pipes.statuses(job) == ["succeeded"] * 4
    assert await fleet.leases(job, "adopted") == ["adopted"]


async def test_task_cannot_give_its_adopter_another_plan(fleet: Fleet, fleet_dock: Daemon, tmp_path: Path) -> None:
    """Proves P2, P5: what is mounted belongs to the task; an adopter reads nothing there, and does not wait."""
    pipes = with_sql(fleet, tmp_path)
    forges = sh("one", "cd ..; rm -f plan; mkfifo plan; echo here; until [ -e tree/gate ]; do sleep 0.05; done")
    job = await submit(pipes, forges, sh("two", "echo two > made"))
    victim = fleet.start({"default": 1}, **SLOW)
    await fleet.says(job, "here")
    planned = {record.snapshot for record in await pipes.tasks(job)}
    victim.kill()
    fleet.start({"other": 1}, **SLOW)
    (tree,) = fleet.folder.rglob("space/tree")
    (tree / "gate").touch()
    ended = await fleet.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, await pipes.content("two")) == (1, "two\n")
    assert {snapshot.id for snapshot in await pipes.snapshots()} == planned


async def test_tag_that_does_not_resolve_fails_the_job_clearly(pipes: Pipes, dock: Daemon) -> None:
    """Proves P3, R17: the worker's engine has the last word on it; nothing runs, and nothing is published."""
    rig = pipes.rig
    async with rig.worker():
        job = await submit(pipes, sh("one", "echo one > made"), image="nowhere:0", max_attempts=3)
        job = await rig.ended(job, Status.FAILED)
    assert job.error is not None
    assert job.error.code == "image_missing"
    assert job.error.message.startswith("there is no image nowhere:0 on the Docker engine at unix://")
    assert job.error.message.endswith(": pull or build it there")
    assert (await pipes.snapshots(), dock.containers()) == ([], [])


async def test_remote_engine_is_refused_clearly(pipes: Pipes, dock: Daemon) -> None:
    """Proves R17: a workspace is a folder of this host. The engine is reached over TCP, as one elsewhere would be."""
    rig = pipes.rig
    async with over_tcp(dock) as host:
        rig.set(docker_host=host)
        async with rig.worker():
            job = await rig.ended(await submit(pipes, sh("one", "true"), max_attempts=3), Status.FAILED)
    assert job.error is not None
    assert job.error.message.startswith("a pipeline's workspace is a folder that is mounted into its container")
    assert await pipes.snapshots() == []


@asynccontextmanager
async def over_tcp(dock: Daemon) -> AsyncIterator[str]:
    """A port of this machine that leads to the engine's socket."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(dock.socket)
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
