"""Limits of attempts: memory, the size of one file and of the folder. Kept over crashes and adoption."""

import os
import sys
from pathlib import Path

import pytest

from holdfast.errors import Invalid
from holdfast.limits import AttemptLimits, LimitSettings
from holdfast.model import Job, Status
from holdfast.runner.folder_size import folder_size
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.wire import Command
from tests.support.crashing_worker import Hook
from tests.support.disks import MIB
from tests.support.docker_engine import DockerEngine
from tests.support.in_process_workers import InProcessWorkers
from tests.support.pipelines import Pipelines, task
from tests.support.service import error_of, service_in_process
from tests.support.supervisor_harness import FOREVER, SupervisedAttempt, needs_root, shell
from tests.support.worker_processes import WorkerProcesses
from tests.worker.test_readiness import passable

GROWS = "n=0; while :; do n=$((n + 1)); head -c 1000000 /dev/zero > file.$n; echo $n > output/n; sleep 0.02; done"
"""Takes more and more room, in small files."""
HOARD = "import sys; print('begin', flush=True); hoard = bytearray(600 * 1024 * 1024)"
SMALL = str(20 * MIB)


def failed_with(job: Job, code: str) -> str:
    assert job.error is not None
    assert (job.status, job.error.code, job.attempts) == (Status.FAILED, code, 1), job.error
    return job.error.message


async def test_a_file_over_its_limit_ends_the_job_with_the_limit_and_the_way_out(workers: InProcessWorkers) -> None:
    limit = {"file_size": "1m"}
    job = await workers.sh("exec dd if=/dev/zero of=big bs=64k", spec=limit, max_attempts=3, retry={"on": ["failed"]})
    in_a_shell = await workers.sh("dd if=/dev/zero of=big bs=64k; exit $?", spec=limit)
    fits = await workers.sh("head -c 1000000 /dev/zero > one; cp one two", spec=limit)
    async with workers.worker():
        message = failed_with(await workers.ended(job), "file_too_large")
        failed_with(await workers.ended(in_a_shell), "file_too_large")
        await workers.ended(fits, Status.SUCCEEDED)
    assert "1 MiB" in message
    assert "spec.file_size" in message
    assert "HOLDFAST_FILE_SIZE_MAX" in message


async def test_memory_over_its_limit_is_out_of_memory(workers: InProcessWorkers) -> None:
    job = await workers.command(sys.executable, "-c", HOARD, spec={"memory": "256m"})
    fits = await workers.command(sys.executable, "-c", HOARD, spec={"memory": "2g"})
    async with workers.worker():
        message = failed_with(await workers.ended(job), "out_of_memory")
        await workers.ended(fits, Status.SUCCEEDED)
    assert "256 MiB" in message
    assert "spec.memory" in message


async def test_a_folder_over_its_limit_is_stopped_and_not_retried(workers: InProcessWorkers) -> None:
    job = await workers.sh(GROWS, spec={"folder_size": SMALL}, max_attempts=3, retry={"on": ["failed"]})
    async with workers.worker():
        ended = await workers.ended(job)
    message = failed_with(ended, "folder_too_large")
    assert "20 MiB" in message
    assert "spec.folder_size" in message
    assert "HOLDFAST_FOLDER_SIZE_MAX" in message
    assert workers.folders == []


async def test_the_log_counts_for_the_folder(workers: InProcessWorkers) -> None:
    job = await workers.sh("yes 0123456789012345678901234567890123456789", spec={"folder_size": SMALL})
    async with workers.worker():
        failed_with(await workers.ended(job), "folder_too_large")


async def test_pipelines_have_limits_too(workers: InProcessWorkers, tmp_path: Path) -> None:
    pipelines = Pipelines(workers, tmp_path)
    async with workers.worker():
        small = await workers.ended(await pipelines.submit(task("one", "echo one > one")), Status.SUCCEEDED)
        grows = task("grows", GROWS.replace("output/n", "n"))
        job = await workers.ended(await pipelines.submit(grows, spec={"folder_size": SMALL}))
    failed_with(job, "folder_too_large")
    assert small.attempts == 1


async def test_settings_give_the_default_and_the_ceiling(workers: InProcessWorkers) -> None:
    workers.set(file_size=MIB, file_size_max=4 * MIB)
    write = "head -c {} /dev/zero > big"
    default = await workers.sh(f"exec {write.format(2 * MIB)}")
    more = await workers.sh(write.format(2 * MIB), spec={"file_size": "3m"})
    over = await workers.sh(write.format(10), spec={"file_size": "5m"})
    async with workers.worker():
        failed_with(await workers.ended(default), "file_too_large")
        await workers.ended(more, Status.SUCCEEDED)
        refused = await workers.ended(over, Status.FAILED)
    assert refused.error is not None
    assert refused.error.code == "contract_violation"
    assert "HOLDFAST_FILE_SIZE_MAX" in refused.error.message


async def test_more_than_a_ceiling_is_refused_at_submit(clean_url: str, tmp_path: Path) -> None:
    settings = {"process_memory_max": 8 * 1024**3, "docker_host": None}
    async with service_in_process(clean_url, tmp_path / "data", **settings) as service, service.client() as client:
        spec = {"command": ["true"], "memory": "9g"}
        refused = await client.post("/v1/jobs", json={"runner": "process", "spec": spec})
        assert (refused.status_code, error_of(refused)["details"]["field"]) == (422, "spec.memory")
        bulk = await client.post("/v1/jobs/bulk", json={"jobs": [{"runner": "process", "spec": spec}]})
        assert (bulk.status_code, error_of(bulk)["details"]["field"]) == (422, "jobs[0].spec.memory")
        spec["memory"] = "8g"
        assert (await client.post("/v1/jobs", json={"runner": "process", "spec": spec})).status_code == 201


async def test_an_adopter_keeps_the_limits_that_the_attempt_was_started_with(processes: WorkerProcesses) -> None:
    """The worker is killed before the folder is over; the next one has no limits in its settings."""
    gate = processes.folder / "gate"
    script = f"echo begun; while [ ! -e {gate} ]; do sleep 0.05; done; {GROWS}"
    first = processes.start({"default": 2}, environment={"HOLDFAST_FOLDER_SIZE": SMALL})
    job = await processes.sh(script)
    await processes.wait_for_log(job, "begun")
    first.signal(9)
    await first.dead()
    gate.touch()
    processes.start({"default": 2}, environment={"HOLDFAST_FOLDER_SIZE": "none"})
    failed_with(await processes.ended(job), "folder_too_large")


async def test_a_worker_killed_after_it_stopped_the_attempt_leaves_the_reason(processes: WorkerProcesses) -> None:
    """kill -9 between the stop and the end: the next worker reads the reason, and runs nothing again."""
    settings = {"HOLDFAST_FOLDER_SIZE": SMALL}
    first = processes.start({"default": 2}, Hook(step="stop_sent", do="kill"), environment=settings)
    job = await processes.sh(f"rm -rf x; {GROWS}", max_attempts=3)
    await first.dead()
    processes.start({"default": 2}, environment={"HOLDFAST_FOLDER_SIZE": "none"})
    failed_with(await processes.ended(job), "folder_too_large")


def test_a_stop_that_fails_the_attempt_keeps_its_text(attempt: SupervisedAttempt) -> None:
    attempt.start(*shell(FOREVER))
    attempt.folder.send(Command(token=5, verb="stop", kind="fail", text="folder_too_large: over"))
    exit = attempt.end()
    assert (exit.cause, exit.text, exit.stopped_by) == ("failed", "folder_too_large: over", "command")


def test_a_limit_that_comes_after_a_cancel_is_not_the_cause(attempt: SupervisedAttempt) -> None:
    attempt.start(*shell(f"trap 'sleep 1' TERM; echo ready; {FOREVER}"), stop_grace=5)
    attempt.folder.send(Command(token=5, verb="stop", kind="cancel"))
    attempt.folder.send(Command(token=5, verb="stop", kind="fail", text="folder_too_large: over"))
    exit = attempt.end()
    assert (exit.cause, exit.text) == ("cancelled", "")


def test_the_size_of_a_folder_follows_no_links_and_counts_a_file_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "file").write_bytes(b"x" * 100_000)
    os.link(folder / "deep" / "er" / "file", folder / "again")
    (tmp_path / "other").write_bytes(b"x" * 1_000_000)
    (folder / "link").symlink_to(tmp_path / "other")
    (folder / "loop").symlink_to(folder)
    assert 100_000 <= folder_size(folder, 10**9) < 200_000
    assert folder_size(folder, 1000) > 1000
    assert folder_size(tmp_path / "gone", 10) == 0
    assert folder_size(folder / "loop", 10) == 0


def test_deeply_nested_files_are_counted(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(300):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    assert folder_size(tmp_path, 10**12) > 10**12
    remove_tree(tmp_path / "d")


def test_sparse_file_counts_its_blocks(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10**9)
    assert folder_size(tmp_path, 10**9) < 100_000


def test_limits_of_a_spec_are_between_the_default_and_the_ceiling() -> None:
    settings = LimitSettings(default=AttemptLimits(memory=100, pids=5), most=AttemptLimits(memory=1000, file_size=7))
    assert settings.of({}) == AttemptLimits(memory=100, pids=5, file_size=7)
    assert settings.of({"memory": "1000", "pids": 1}) == AttemptLimits(memory=1000, pids=1, file_size=7)
    with pytest.raises(Invalid, match=r"spec\.memory: 1k is more than HOLDFAST_PROCESS_MEMORY_MAX allows: 1000 bytes"):
        settings.of({"memory": "1k"})


async def test_containers_have_limits_of_files_too(workers: InProcessWorkers, docker: DockerEngine) -> None:
    file = await workers.container("exec dd if=/dev/zero of=$HOLDFAST_WORK_DIR/big bs=64k", spec={"file_size": "1m"})
    script = f"cd $HOLDFAST_WORK_DIR; {GROWS}"
    folder = await workers.container(script, spec={"folder_size": SMALL})
    async with workers.worker():
        failed_with(await workers.ended(file), "file_too_large")
        failed_with(await workers.ended(folder), "folder_too_large")


@needs_root
async def test_processes_over_their_limit_are_refused(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Each attempt is a user of its own: the processes of one attempt are counted, and no others."""
    passable(tmp_path)
    workers.set(process_user=None, process_uids_dir=tmp_path / "uids")
    bomb = "for n in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 5 & done; wait"
    job = await workers.sh(bomb, spec={"pids": 8})
    fits = [await workers.sh("sleep 1 & sleep 1 & wait", spec={"pids": 8}) for _ in range(4)]
    async with workers.worker():
        message = failed_with(await workers.ended(job), "too_many_processes")
        for one in fits:
            await workers.ended(one, Status.SUCCEEDED)
    assert "8 processes and threads" in message
    assert "spec.pids" in message
