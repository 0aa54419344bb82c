"""A disk that is full when an attempt is to start: nothing runs, the attempt does not count, and the job waits."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.model import Cause, Job, Status
from holdfast.runner.spare_markers import SPARES
from holdfast.worker.worker import Worker
from tests.support.attempt_records import assert_only_waited, attempts_of
from tests.support.disks import MIB, FullDisk, tmpfs
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.pipelines import Pipelines, adds, task
from tests.support.service import service_in_process
from tests.support.supervisor_harness import needs_root

MOST = 24
"""More pages, and more files, than a start needs."""


@pytest.fixture(params=["pages", "files"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FullDisk]:
    with tmpfs(tmp_path / "disk", "size=2m,nr_inodes=200") as place:
        yield FullDisk(place, str(request.param))


def state_on(workers: InProcessWorkers, disk: FullDisk) -> None:
    """Only the state folder is on the disk, and no reserve keeps the worker from trying."""
    workers.set(shared_dir=workers.settings.shared, state_dir=disk.place / "state", disk_reserve=None)


async def settled(worker: Worker, disk: FullDisk) -> None:
    """Wait until a worker runs and has made its spare markers: after that it writes nothing by itself."""
    await worker.started.wait()

    async def made() -> bool:
        return len(list(disk.place.glob("state/spare-markers/*/[0-9]"))) == SPARES

    await eventually(made, "the spare markers are made")


async def given_back(workers: InProcessWorkers, job: Job) -> Job:
    """Wait until a start of the job found no space, or until it ended."""

    async def look() -> Job | None:
        found = await workers.get(job)
        return found if found.status.terminal or found.attempt > 1 else None

    return await eventually(look, "the disk is full at a start")


@needs_root
@pytest.mark.usefixtures("short_pauses")
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
@pytest.mark.usefixtures("short_pauses")
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
@pytest.mark.usefixtures("short_pauses")
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
@pytest.mark.usefixtures("short_pauses")
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
@pytest.mark.usefixtures("short_pauses")
async def test_workspace_that_cannot_be_restored_waits_for_space(workers: InProcessWorkers, tmp_path: Path) -> None:
    """The supervisor holds; no task runs meanwhile, and a cancel reaches it."""
    with tmpfs(tmp_path / "disk", "size=4m") as place:
        disk = FullDisk(place, "pages")
        state_on(workers, disk)
        pipelines = Pipelines(workers, tmp_path)
        large = task("large", f"head -c {MIB} /dev/urandom > big")
        async with workers.worker() as worker:
            await workers.ended(await pipelines.submit(large, adds("first")), Status.SUCCEEDED)

            async def removed() -> bool:
                return not list(place.rglob("big"))

            await eventually(removed, "the first workspace, whose removal frees space, is gone")
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
