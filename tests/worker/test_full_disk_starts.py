"""A disk that is full when an attempt is to start: nothing runs, the attempt does not count, and the job waits."""

import errno
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Attempt, Cause, Job, Status
from holdfast.runner import start_pause
from holdfast.runner.attempt_folder import AttemptFolder, write_new
from holdfast.runner.base import NoSpace
from holdfast.runner.docker import container_config
from holdfast.runner.docker.engine import Engine, EngineError
from holdfast.runner.spare_markers import SPARES, SpareMarkers
from holdfast.runner.start_pause import StartPause, needs_space
from holdfast.runner.supervisor.protocol import ExitStatus
from holdfast.worker import classify, pipeline_execution
from holdfast.worker.worker import Worker
from tests.support.crashing_worker import Hook
from tests.support.disks import MIB
from tests.support.docker_engine import DockerEngine
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.pipelines import Pipelines, adds, task
from tests.support.service import service_in_process
from tests.support.supervisor_harness import needs_root
from tests.support.worker_processes import WorkerProcesses

PAGE = 4096
MOST = 24
"""More pages, and more files, than a start needs."""


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)  # A worker process may still be leaving.


class FullDisk:
    """A tmpfs on which a number of pages, or of files, is free."""

    def __init__(self, place: Path, what: str) -> None:
        self.place = place
        self.what = what

    def leave(self, free: int) -> None:
        """Fill the disk but for so many pages or files."""
        self.clear()
        if self.what == "pages":
            with (self.place / "filler").open("wb", 0) as file:
                left = os.statvfs(self.place).f_bavail - free
                file.write(b"x" * PAGE * max(0, left))
            return
        with suppress(OSError):  # A worker may take one of them at the same time.
            for n in range(os.statvfs(self.place).f_favail - free):
                (self.place / f"filler.{n}").touch()

    def clear(self) -> None:
        for path in self.place.glob("filler*"):
            path.unlink()


@pytest.fixture(params=["pages", "files"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FullDisk]:
    with tmpfs(tmp_path / "disk", "size=2m,nr_inodes=200") as place:
        yield FullDisk(place, str(request.param))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits: there are many full disks here."""
    monkeypatch.setattr(start_pause, "BASE_SECONDS", 0.05)
    monkeypatch.setattr(start_pause, "CAP_SECONDS", 0.1)
    monkeypatch.setattr(classify, "NO_SPACE_BASE", 0.05)
    monkeypatch.setattr(classify, "NO_SPACE_CAP", 0.1)
    monkeypatch.setattr(pipeline_execution, "NO_SPACE_BASE", 0.05)


def state_on(workers: InProcessWorkers, disk: FullDisk) -> None:
    """Only the state folder is on the disk, and no reserve keeps the worker from trying."""
    workers.set(shared_dir=workers.settings.shared, state_dir=disk.place / "state", disk_reserve=None)


async def settled(worker: Worker, disk: FullDisk) -> None:
    """Wait until a worker runs and has made its spare markers: after that it writes nothing by itself."""
    await worker.started.wait()

    async def made() -> bool:
        return len(list(disk.place.glob("state/spare-markers/*/[0-9]"))) == SPARES

    await eventually(made, "the spare markers are made")


async def with_state(processes: WorkerProcesses, environment: Mapping[str, str]) -> None:
    """Let a worker make the state folder, while there is space, and stay."""
    processes.start({"other": 1}, adopts=False, environment=environment)
    await processes.ended(await processes.sh("true", queue="other"), Status.SUCCEEDED)
    attempts = Path(environment["HOLDFAST_STATE_DIR"]) / "attempts"

    async def removed() -> bool:
        return not list(attempts.glob("*/*"))

    await eventually(removed, "the folder of the first attempt is removed, and takes no space any more")


async def attempts_of(workers: InProcessWorkers, job: Job) -> Sequence[Attempt]:
    return await workers.store.attempts.list(job.id)


async def given_back(workers: InProcessWorkers, job: Job) -> Job:
    """Wait until a start of the job found no space, or until it ended."""

    async def look() -> Job | None:
        found = await workers.get(job)
        return found if found.status.terminal or found.attempt > 1 else None

    return await eventually(look, "the disk is full at a start")


def assert_only_waited(attempts: Sequence[Attempt]) -> None:
    """Nothing ran in these attempts, for lack of space."""
    for attempt in attempts:
        assert attempt.error is not None
        assert (attempt.cause, attempt.error.code, attempt.started_at) == (Cause.DRAINED, "disk_full", None)


@needs_root
@pytest.mark.usefixtures("quick")
async def test_disk_that_is_full_at_any_step_of_a_start_fails_no_job(
    workers: InProcessWorkers, disk: FullDisk, tmp_path: Path
) -> None:
    """With each number of free pages or files, up to what a start needs. Proves R12, L13.

    The job waits and is not counted; then it runs once, or is cancelled at once.
    """
    state_on(workers, disk)
    marker = tmp_path / "ran"
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "KEY").write_text("hidden")
    workers.set(secrets_dir=tmp_path / "secrets")
    waited, ran = 0, list[str]()
    async with workers.worker() as worker:
        await settled(worker, disk)
        for free in range(MOST):
            disk.leave(free)
            spec = {"stdin": "x" * 5000}
            script, inputs = f"cat >/dev/null; echo {free} >> {marker}", {"n": "y" * 5000}
            job = await workers.sh(script, spec=spec, secrets=["KEY"], inputs=inputs)
            if (await given_back(workers, job)).status is Status.SUCCEEDED:
                ran.append(str(free))
                continue
            waited += 1
            if free % 3 == 2:
                await workers.store.jobs.cancel(job.id)
                ended = await workers.ended(job, Status.CANCELLED)
                assert ended.attempts == 0
                *before, last = await attempts_of(workers, job)
                assert_only_waited(before)
                assert (last.cause, last.started_at) in [(Cause.DRAINED, None), (Cause.CANCELLED, None)]
                continue
            disk.clear()
            ended = await workers.ended(job, Status.SUCCEEDED)
            assert ended.attempts == 1
            ran.append(str(free))
            *before, last = await attempts_of(workers, job)
            assert_only_waited(before)
            assert last.cause is Cause.EXIT
    assert marker.read_text().split() == ran
    assert 5 <= waited < MOST, "some starts found no space, and some did"


@needs_root
async def test_worker_pauses_at_once_and_says_why(workers: InProcessWorkers, disk: FullDisk) -> None:
    """No loop of starts; the job can be cancelled, and other workers may take it."""
    state_on(workers, disk)
    async with workers.worker() as worker:
        await settled(worker, disk)
        disk.leave(0)
        job = await workers.sh("true")

        async def pauses() -> bool:
            return (
                worker.capabilities.short_of_room("process") is not None
                and worker.capabilities.domain_of("process") is None
            )

        await eventually(pauses, "the worker starts nothing for now")

        async def explained() -> bool:
            why = await workers.store.explain.job(job.id)
            return any("the disk was full at a start" in reason.message for reason in why.reasons)

        await eventually(explained, "explain says why it waits")
        events = [event.data for event in await workers.events(job, "status")]
        assert any(event.get("code") == "disk_full" and "No space" in event["message"] for event in events), events
        await workers.store.jobs.cancel(job.id)
        assert (await workers.get(job)).status is Status.CANCELLED
    assert len(await attempts_of(workers, job)) <= 3


@needs_root
@pytest.mark.usefixtures("quick")
async def test_folder_that_a_full_disk_left_is_removed(workers: InProcessWorkers, disk: FullDisk) -> None:
    """What was staged for the start takes space itself. The start marker stays, in a block that was reserved."""
    state_on(workers, disk)
    async with workers.worker() as worker:
        await settled(worker, disk)
        for free in range(MOST):
            disk.leave(free)
            job = await workers.sh("true")
            if (await given_back(workers, job)).status is Status.SUCCEEDED:
                continue
            await workers.store.jobs.cancel(job.id)
            await workers.ended(job)

    def left() -> set[str]:
        return {path.name for folder in workers.folders for path in folder.iterdir()}

    assert left() <= {"lock", "started"}
    assert not [folder for folder in workers.folders if folder.name.startswith(".")]


@needs_root
@pytest.mark.usefixtures("quick")
async def test_inputs_that_find_no_space_wait(workers: InProcessWorkers, tmp_path: Path) -> None:
    """An upload that is larger than what is free; the partial copy is removed."""
    with tmpfs(tmp_path / "disk", "size=2m") as place:
        disk = FullDisk(place, "pages")
        state_on(workers, disk)
        service = service_in_process(workers.settings.url, tmp_path, disk_reserve=None, docker_host=None)
        async with service as server, server.client() as client, workers.worker():
            form = [("file", ("large", b"x" * MIB))]
            upload = (await client.post("/v1/uploads", files=form)).json()["upload"]
            disk.leave(100)
            spec = {"command": ["sh", "-c", "wc -c < input/large"]}
            made = await client.post("/v1/jobs", json={"runner": "process", "spec": spec, "uploads": [upload]})
            job = await workers.get(made.json()["id"])
            await given_back(workers, job)
            assert os.statvfs(place).f_bavail > 90
            disk.clear()
            ended = await workers.ended(job, Status.SUCCEEDED)
        assert (ended.attempts, await workers.log(job)) == (1, [str(MIB)])
        assert_only_waited((await attempts_of(workers, job))[:-1])


@needs_root
@pytest.mark.usefixtures("quick")
async def test_readiness_check_on_a_full_disk_waits(workers: InProcessWorkers, disk: FullDisk) -> None:
    """A check runs under a supervisor too. It is not called not ready, which would pause the job."""
    state_on(workers, disk)
    async with workers.worker() as worker:
        await settled(worker, disk)
        for free in range(0, MOST, 2):
            disk.leave(free)
            job = await workers.sh("true", check={"command": ["true"], "timeout": 60})
            if (await given_back(workers, job)).status is not Status.SUCCEEDED:
                disk.clear()
                assert (await workers.ended(job, Status.SUCCEEDED)).attempts == 1
                assert_only_waited((await attempts_of(workers, job))[:-1])


@needs_root
@pytest.mark.usefixtures("quick")
async def test_workspace_that_cannot_be_restored_waits_for_space(workers: InProcessWorkers, tmp_path: Path) -> None:
    """The supervisor holds; no task runs meanwhile, and a cancel reaches it."""
    with tmpfs(tmp_path / "disk", "size=4m") as place:
        disk = FullDisk(place, "pages")
        state_on(workers, disk)
        pipelines = Pipelines(workers, tmp_path)
        large = task("large", f"head -c {MIB} /dev/urandom > big")
        async with workers.worker() as worker:
            await workers.ended(await pipelines.submit(large, adds("first")), Status.SUCCEEDED)
            disk.leave(100)
            jobs = [await pipelines.submit(large, adds(name)) for name in ("second", "third")]
            for job in jobs:
                await workers.running(job)

            async def waits() -> str | None:
                return worker.capabilities.short_of_room("process")

            await eventually(waits, "the disk is full at the restore")

            async def explained() -> bool:
                why = await workers.store.explain.job(jobs[0].id)
                return any("has not started" in one.message and "restore" in one.message for one in why.reasons)

            await eventually(explained, "explain says why it waits")
            await workers.store.jobs.cancel(jobs[1].id)
            await workers.ended(jobs[1], Status.CANCELLED)
            disk.clear()
            assert (await workers.ended(jobs[0], Status.SUCCEEDED)).attempts == 1
        assert pipelines.ran() == ["large", "first", "second"]


@needs_root
async def test_worker_killed_at_any_step_on_a_full_disk_runs_nothing_twice(
    processes: WorkerProcesses, tmp_path: Path
) -> None:
    """kill -9 before the start, after it found no space, and before and after the job was requeued."""
    with tmpfs(tmp_path / "disk", "size=2m") as place:
        disk = FullDisk(place, "pages")
        environment = {"HOLDFAST_STATE_DIR": str(place / "state"), "HOLDFAST_DISK_RESERVE": "none"}
        await with_state(processes, environment)
        steps = ("prepared", "no space", "classified", "finished", "removed")
        for free in (0, 8):
            for step in steps:
                disk.leave(free)
                job = await processes.sh(f"echo ran >> {tmp_path / 'ran'}", queue=step)
                victim = processes.start({step: 1}, Hook(step=step, do="kill", job=job.id), environment=environment)
                assert await victim.dead() == -9, step
                disk.clear()
                survivor = processes.start({step: 1}, environment=environment)
                ended = await processes.ended(job, Status.SUCCEEDED)
                assert ended.attempts == 1, step
                survivor.signal(15)
                await survivor.dead()
        assert (tmp_path / "ran").read_text().split() == ["ran"] * 2 * len(steps)


@needs_root
@pytest.mark.parametrize("step", ["prepared", "no space"])
async def test_orphan_that_never_started_can_be_cancelled_on_a_full_disk(
    processes: WorkerProcesses, tmp_path: Path, step: str
) -> None:
    """Its start marker needs no new block: there is a reserved one in its folder or, if that is missing, a spare."""
    with tmpfs(tmp_path / "disk", "size=2m") as place:
        disk = FullDisk(place, "pages")
        environment = {"HOLDFAST_STATE_DIR": str(place / "state"), "HOLDFAST_DISK_RESERVE": "none"}
        await with_state(processes, environment)
        disk.leave(8)
        job = await processes.sh("echo ran")
        victim = processes.start({"default": 1}, Hook(step=step, do="kill"), environment=environment)
        assert await victim.dead() == -9
        made = [path for path in (place / "state").glob("attempts/*/*") if (path / "spare.0").exists()]
        assert len(made) == (step == "no space")
        disk.leave(0)
        await processes.store.jobs.cancel(job.id)
        processes.start({"default": 1}, environment=environment)
        assert (await processes.ended(job, Status.CANCELLED)).attempts == 0


@needs_root
@pytest.mark.parametrize("what", ["pages", "files"])
def test_missing_folder_is_forbidden_by_a_spare_marker_on_a_full_disk(tmp_path: Path, what: str) -> None:
    with tmpfs(tmp_path / "disk", "size=256k,nr_inodes=80") as place:
        disk, markers = FullDisk(place, what), SpareMarkers(place / "spare")
        (place / "attempts").mkdir()
        markers.refill()
        for n in range(SPARES):
            os.utime(place / "spare" / str(n), (0, 0))
        disk.leave(0)
        folders = [AttemptFolder(place / "attempts" / f"job.{n}") for n in range(SPARES + 1)]
        for folder in folders[:SPARES]:
            assert markers.forbid(folder)
            assert folder.forbidden()
            assert folder.path.stat().st_mtime > 0, "it is kept as long as one that is made now"
            assert markers.forbid(folder)
        with pytest.raises(OSError, match="No space"):
            markers.forbid(folders[-1])
        assert not folders[-1].path.exists()
        disk.clear()
        assert markers.forbid(folders[-1])
        markers.refill()
        assert len(list((place / "spare").iterdir())) == SPARES


@pytest.mark.parametrize("name", ["started", "exit"])
def test_folder_that_appears_first_is_not_replaced_by_a_marker(tmp_path: Path, name: str) -> None:
    """A slow previous owner made it between our look and our rename."""
    markers = SpareMarkers(tmp_path / "spare")
    markers.refill()
    folder = AttemptFolder(tmp_path / "job.1")
    folder.create()
    (folder.path / name).write_text("{}")
    assert not markers._place(folder.path)
    assert not markers.forbid(folder)
    assert (folder.path / name).read_text() == "{}"


def test_file_that_does_not_fit_whole_is_an_error(tmp_path: Path) -> None:
    """A write on a nearly full disk may be short: that must not pass for a file."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a filesystem")
    with tmpfs(tmp_path / "disk", "size=16k") as place:
        with pytest.raises(OSError, match="No space") as error:
            write_new(place / "file", b"x" * 5 * PAGE)
        assert error.value.errno == errno.ENOSPC


def test_start_marker_is_written_on_a_full_disk(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a filesystem")
    with tmpfs(tmp_path / "disk", "size=64k") as place:
        folder = AttemptFolder(place / "attempt")
        folder.create()
        folder.write_spares()
        FullDisk(place, "pages").leave(0)
        assert folder.forbid()
        assert folder.forbidden()
        folder.reduce_to_marker()
        assert {path.name for path in folder.path.iterdir()} == {"lock", "started"}


def test_pauses_grow_while_starts_fail_and_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("holdfast.runner.start_pause.time.monotonic", lambda: now)
    pause = StartPause()
    found = []
    for _ in range(8):
        pause.begin("full")
        pause.begin("full, too")
        assert pause.why == "full"
        found.append(pause.left)
        now += pause.left
        assert pause.why is None
    assert found == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    now += 61.0
    pause.begin("full")
    assert pause.left == 2.0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_and_full_quota_are_no_space(number: int) -> None:
    with pytest.raises(NoSpace, match=os.strerror(number)), needs_space("cannot write"):
        raise OSError(number, os.strerror(number))
    with pytest.raises(PermissionError), needs_space("cannot write"):
        raise PermissionError(errno.EACCES, "no")


# Containers


@pytest.mark.parametrize("call", ["create", "put", "start"])
@pytest.mark.usefixtures("quick")
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


@pytest.mark.usefixtures("quick")
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
