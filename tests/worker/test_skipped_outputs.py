"""Links and special files under `output/`: skipped and named in the job's events, while everything else is kept."""

import signal
import socket
import tarfile
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Job, Status
from holdfast.runner.collected_outputs import CollectedOutputs, ContractViolation
from holdfast.runner.folder_writer import FolderWriter
from holdfast.runner.output_sources import collect_folder, collect_tar
from tests.support.crashing_worker import Hook
from tests.support.docker_engine import IMAGE, DockerEngine
from tests.support.in_process_workers import InProcessWorkers
from tests.support.worker_processes import WorkerProcesses
from tests.worker.test_collect import LIMITS, artifacts_of, member, tar

SCRIPT = """
mkdir -p output/sub
echo fine > output/fine; echo deep > output/sub/deep
ln -s /etc/passwd output/link; ln -s / output/sub/root; mkfifo output/pipe
ln -s nowhere "output/$(printf 'a\\nb')"
"""
SKIPPED = [
    {"path": "output/a\\nb", "reason": "is a symbolic link"},
    {"path": "output/link", "reason": "is a symbolic link"},
    {"path": "output/pipe", "reason": "is a FIFO"},
    {"path": "output/sub/root", "reason": "is a symbolic link"},
]
KEPT = {"fine": b"fine\n", "sub/deep": b"deep\n"}


async def skipped_in(workers: InProcessWorkers, job: Job) -> list[dict[str, str]]:
    """What the events of a job say was skipped, by path."""
    events = await workers.events(job, "artifacts")
    return sorted((one for event in events for one in event.data["skipped"]), key=lambda one: str(one["path"]))


async def test_link_under_output_is_skipped_and_the_rest_of_a_process_is_kept(workers: InProcessWorkers) -> None:
    """Proves R14: the job succeeds, no link is followed, and the events name what is missing."""
    job, failed, plain = (
        await workers.sh(SCRIPT),
        await workers.sh(SCRIPT + "exit 4"),
        await workers.sh("echo x > output/x"),
    )
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
        await workers.ended(failed, Status.FAILED)
        await workers.ended(plain, Status.SUCCEEDED)
    for one in (job, failed):
        assert await artifacts_of(workers, one) == KEPT
        assert await skipped_in(workers, one) == SKIPPED
    assert await workers.events(plain, "artifacts") == []


async def test_file_with_a_second_name_is_skipped(workers: InProcessWorkers) -> None:
    """Proves R14: the other name may be somebody else's file."""
    job = await workers.sh("echo a > a; ln a output/linked; echo fine > output/fine")
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    assert await artifacts_of(workers, job) == {"fine": b"fine\n"}
    assert await skipped_in(workers, job) == [{"path": "output/linked", "reason": "is a hard link"}]


async def test_link_under_output_is_skipped_and_the_rest_of_a_container_is_kept(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """Proves R14."""
    job = await workers.container(SCRIPT)
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    assert await artifacts_of(workers, job) == KEPT
    assert await skipped_in(workers, job) == SKIPPED


async def test_link_that_a_task_left_is_skipped_and_the_rest_is_kept(workers: InProcessWorkers) -> None:
    """Proves R14 for pipelines of processes."""
    task = {"name": "make", "command": ["sh", "-ec", f'cd "$HOLDFAST_WORK_DIR"; {SCRIPT}']}
    job = await workers.submit(runner="process", spec={}, tasks=[task])
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    assert await artifacts_of(workers, job) == KEPT
    assert await skipped_in(workers, job) == SKIPPED


async def test_link_that_a_task_left_in_a_container_is_skipped(workers: InProcessWorkers, docker: DockerEngine) -> None:
    """Proves R14 for pipelines of containers."""
    task = {"name": "make", "command": ["sh", "-ec", f'cd "$HOLDFAST_WORK_DIR"; {SCRIPT}']}
    job = await workers.submit(runner="docker", spec={"image": IMAGE}, tasks=[task])
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    assert await artifacts_of(workers, job) == KEPT
    assert await skipped_in(workers, job) == SKIPPED


async def test_adopter_reports_a_skipped_link_only_once(processes: WorkerProcesses) -> None:
    """Proves R14: killed between the event and the finish, its successor does not repeat the event."""
    job = await processes.sh(SCRIPT)
    slow: Any = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}
    victim = processes.start({"default": 1}, Hook(step="classified", do="kill"), **slow)
    assert await victim.dead() == -signal.SIGKILL
    assert await skipped_in(processes, job) == SKIPPED
    processes.start({"default": 1}, **slow)
    await processes.ended(job, Status.SUCCEEDED)
    assert await skipped_in(processes, job) == SKIPPED


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        (member("output/x", tarfile.SYMTYPE, "/etc/passwd"), "is a symbolic link"),
        (member("output/x", tarfile.LNKTYPE, "other"), "is a hard link"),
        (member("output/x", tarfile.FIFOTYPE), "is a FIFO"),
        (member("output/x", tarfile.CHRTYPE), "is a device"),
        (member("output/x", tarfile.BLKTYPE), "is a device"),
    ],
    ids=lambda value: value.type.decode() if isinstance(value, tarfile.TarInfo) else "",
)
def test_archive_is_taken_without_its_links(tmp_path: Path, link: tarfile.TarInfo, reason: str) -> None:
    """Proves R14."""
    gathered = CollectedOutputs(FolderWriter(tmp_path / "job" / "1.1"), LIMITS)
    collect_tar(tar((link, b""), (member("output/fine"), b"fine")), gathered)
    gathered.publish()
    assert [path.name for path in (tmp_path / "job" / "1.1").iterdir()] == ["fine"]
    assert [(one.path, one.reason) for one in gathered.skipped] == [("output/x", reason)]


def test_socket_in_a_folder_is_skipped(tmp_path: Path) -> None:
    """Proves R14."""
    output = tmp_path / "work" / "output"
    output.mkdir(parents=True)
    (output / "fine").write_text("fine")
    gathered = CollectedOutputs(FolderWriter(tmp_path / "1.1"), LIMITS)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(output / "socket"))
        collect_folder(tmp_path / "work", gathered)
    gathered.publish()
    assert [path.name for path in (tmp_path / "1.1").iterdir()] == ["fine"]
    assert [(one.path, one.reason) for one in gathered.skipped] == [("output/socket", "is a socket")]


def test_links_alone_publish_nothing_and_count_as_entries(tmp_path: Path) -> None:
    """Proves R14: they cannot be used to make holdfast walk without an end."""
    output = tmp_path / "work" / "output"
    output.mkdir(parents=True)
    for n in range(10):
        (output / str(n)).symlink_to("x")
    gathered = CollectedOutputs(FolderWriter(tmp_path / "1.1"), LIMITS)
    collect_folder(tmp_path / "work", gathered)
    assert (gathered.empty, len(gathered.skipped)) == (True, 10)
    (output / "more").symlink_to("x")
    with pytest.raises(ContractViolation, match="output has more than 10 entries"):
        collect_folder(tmp_path / "work", CollectedOutputs(FolderWriter(tmp_path / "1.2"), LIMITS))
