"""Readiness checks: their user, their leftovers, and their output."""

import contextlib
import os
import shutil
import signal
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Job, Status
from holdfast.runner.attempt_folder import AttemptFolder
from tests.support.docker_engine import DockerEngine
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.supervisor_harness import needs_root
from tests.support.worker_processes import WorkerProcesses, alive

WHO = "echo uid=$(id -u) gid=$(id -g) groups=$(id -G) $(grep NoNewPrivs /proc/self/status) > {path}"
FIRST, LAST = 2_100_000_000, 2_100_000_063
AS_65532 = "uid=65532 gid=65532 groups=65532 NoNewPrivs: 1"
ESCAPE = """
( setsid sh -c 'trap "" TERM HUP; echo $$ >> "{pids}"; exec env -i sleep 86399' >/dev/null 2>&1 & )
while [ ! -s {pids} ]; do sleep 0.01; done
"""
"""Leaves a process that double-forked, has a session of its own, ignores signals, and has no environment."""


def check(script: str, timeout: float = 60.0) -> dict[str, Any]:
    return {"command": ["sh", "-c", script], "timeout": timeout}


def passable(folder: Path) -> None:
    """Let other users pass through a test's folder, as they can through /var/lib/holdfast."""
    for parent in [folder, *folder.parents]:
        if parent != Path("/") and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)


async def paused(workers: InProcessWorkers, job: Job) -> str:
    """The message of a job that was not ready."""
    found = await workers.ended(job, Status.PAUSED)
    assert found.error is not None
    assert found.error.code == "not_ready"
    return found.error.message


@pytest.fixture
def isolated(workers: InProcessWorkers, tmp_path: Path) -> InProcessWorkers:
    """Workers whose processes run as another user."""
    passable(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    workers.set(process_user="65532")
    return workers


@pytest.fixture
def own(isolated: InProcessWorkers, tmp_path: Path) -> InProcessWorkers:
    """Workers whose attempts have a uid each."""
    isolated.set(process_user=None, process_uids=f"{FIRST}-{LAST}", process_uids_dir=tmp_path / "uids")
    return isolated


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that everybody may write to and that no private /tmp covers."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/var/lib"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


async def freed(workers: InProcessWorkers) -> None:
    async def look() -> bool:
        return not [name for name in os.listdir(workers.settings.process_uids_dir) if name.isdigit()]

    await eventually(look, "all uids are free")


@needs_root
async def test_a_check_has_a_uid_of_its_own(own: InProcessWorkers, outside: Path) -> None:
    """Not that of the attempt, and free again when the check is over. Proves I1."""
    files = [outside / str(n) for n in range(2)]
    await own.store.lanes.set_check("db", check(f"id -u > {files[0]}"))
    job = await own.sh("id -u", lane="db", check=check(f"id -u > {files[1]}"))
    async with own.worker():
        await own.ended(job, Status.SUCCEEDED)
        await freed(own)
    uids = [int(path.read_text()) for path in files]
    assert all(FIRST <= uid <= LAST for uid in uids)
    assert int((await own.log(job))[0]) not in uids
    assert own.folders == []


@needs_root
async def test_a_check_has_little_memory_few_processes_and_small_files(own: InProcessWorkers, outside: Path) -> None:
    """Proves I1."""
    script = (
        f"head -c 70000000 /dev/zero > big; stat -c %s big > {outside}/size;"
        f" grep -E 'Max (processes|data)' /proc/self/limits > {outside}/limits"
    )
    own.set(process_memory=2**31)
    job = await own.sh("true", check=check(script))
    async with own.worker():
        await own.ended(job, Status.SUCCEEDED)
    assert (outside / "size").read_text() == "67108864\n"
    data, most = (outside / "limits").read_text().splitlines()
    assert (data.split()[3], most.split()[2]) == (str(2**31), "256")


@needs_root
async def test_nothing_of_a_check_is_left_when_its_supervisor_is_killed(own: InProcessWorkers, outside: Path) -> None:
    """What escaped is found by its uid, and the check is tried again. Proves I1."""
    pids, ready = outside / "pids", outside / "ready"
    job = await own.sh("true", check=check(f"[ -e {ready} ] && exit 0; {ESCAPE.format(pids=pids)} sleep 86399", 600.0))
    async with own.worker():
        await eventually(_written(pids), "the check runs")
        (folder,) = own.folders
        started = AttemptFolder(folder).started()
        assert started is not None
        ready.touch()
        os.kill(started.supervisor_pid, signal.SIGKILL)
        await own.ended(job, Status.SUCCEEDED)
        assert not alive(pids.read_text())
        await freed(own)
    assert own.folders == []


@needs_root
async def test_a_check_runs_as_the_user_of_processes(isolated: InProcessWorkers, tmp_path: Path) -> None:
    """Of a job, of a lane, of a function; not as root. Proves I1, C10."""
    workers, files = isolated, [tmp_path / "open" / str(n) for n in range(4)]
    workers.functions.add(name="f")(lambda: None)
    checks = [check(WHO.format(path=path)) for path in files]
    await workers.store.lanes.set_check("processes", checks[1])
    await workers.store.lanes.set_check("functions", checks[3])
    jobs = [
        await workers.sh("true", check=checks[0]),
        await workers.sh("true", lane="processes"),
        await workers.submit("f", check=checks[2]),
        await workers.submit("f", lane="functions"),
    ]
    async with workers.worker():
        for job in jobs:
            await workers.ended(job, Status.SUCCEEDED)
    assert [path.read_text().strip() for path in files] == [AS_65532] * 4


@needs_root
async def test_a_check_of_a_container_job_runs_on_the_host_as_the_user_of_processes(
    isolated: InProcessWorkers, docker: DockerEngine, tmp_path: Path
) -> None:
    """Proves I1, C10."""
    file = tmp_path / "open" / "file"
    job = await isolated.container("true", check=check(WHO.format(path=file)))
    async with isolated.worker():
        await isolated.ended(job, Status.SUCCEEDED)
    assert file.read_text().strip() == AS_65532


@needs_root
async def test_a_check_of_a_job_with_a_user_runs_as_that_user_and_one_of_a_lane_does_not(
    isolated: InProcessWorkers, tmp_path: Path
) -> None:
    """Who may name a lane's check need not be allowed to act as the user of an admin's job. Proves I1."""
    workers, own, lane = isolated, tmp_path / "open" / "own", tmp_path / "open" / "lane"
    await workers.store.lanes.set_check("db", check(WHO.format(path=lane)))
    job = await workers.sh("true", spec={"user": "12345:12346"}, lane="db", check=check(WHO.format(path=own)))
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    assert own.read_text().startswith("uid=12345 gid=12346 groups=12346 ")
    assert lane.read_text().strip() == AS_65532


@needs_root
async def test_a_check_has_a_clean_environment_no_input_and_a_folder_of_its_own(
    isolated: InProcessWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves I1, C10."""
    workers, file = isolated, tmp_path / "open" / "file"
    monkeypatch.setenv("HOLDFAST_SECRET_KEY", "hunter2hunter2")
    monkeypatch.setenv("WORKERS_OWN", "1")
    script = (
        f'exec > {file}; cat; echo x > mine; stat -c %u . mine; ls -A; [ "$PWD" = "$HOME" ] && echo home;'
        " tr '\\0' '\\n' < /proc/$$/environ | cut -d= -f1 | sort; ls /proc/$$/fd"
    )
    job = await workers.sh("true", check=check(script))
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    words = file.read_text().split()
    assert words[:4] == ["65532", "65532", "mine", "home"]
    assert [word for word in words[4:] if not word.isdigit()] == [
        "HOLDFAST_ATTEMPT", "HOLDFAST_JOB_ID", "HOLDFAST_MARK", "HOLDFAST_WORK_DIR", "HOME", "LANG", "PATH",
    ]  # fmt: skip
    assert {int(word) for word in words[4:] if word.isdigit()} <= {0, 1, 2, 10}
    assert workers.folders == []


async def test_the_output_of_a_check_is_capped(workers: InProcessWorkers) -> None:
    """What it says beyond the cap is neither kept nor read. Proves I1."""
    job = await workers.sh("true", check=check("yes 0123456789abcdef | head -c 64000000; exit 1", 8.0))
    tracemalloc.start()
    try:
        async with workers.worker():
            said = await paused(workers, job)
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()
    assert "0123456789abcdef" in said
    assert len(said) < 1000


async def test_nothing_of_a_check_is_left_when_it_succeeds(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Also what double-forked, made a session of its own and cleared its environment. Proves I1."""
    pids = tmp_path / "pids"
    job = await workers.sh("echo ran", check=check(ESCAPE.format(pids=pids), 60.0))
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
        assert not alive(pids.read_text())
    assert await workers.log(job) == ["ran"]
    assert workers.folders == []


async def test_nothing_of_a_check_is_left_when_its_time_is_over(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves I1, C10."""
    pids = tmp_path / "pids"
    job = await workers.sh("true", check=check(ESCAPE.format(pids=pids) + "echo waits; sleep 86399", 6.0))
    async with workers.worker():
        assert "waits" in await paused(workers, job)
        assert pids.read_text().split()
        assert not any(map(alive, pids.read_text().split()))
    assert workers.folders == []


async def test_nothing_of_a_check_is_left_when_its_job_is_cancelled(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves I1."""
    pids = tmp_path / "pids"
    job = await workers.sh("true", check=check(ESCAPE.format(pids=pids) + "sleep 86399", 600.0))
    async with workers.worker():
        await eventually(_written(pids), "the check runs")
        await workers.store.jobs.cancel(job.id)
        await workers.ended(job, Status.CANCELLED)
        assert not alive(pids.read_text())
    assert workers.folders == []


async def test_the_output_of_a_check_is_masked(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the excerpt or the cap would cut a secret in two. Proves I1, C9."""
    secret = "correct-horse-battery-staple"
    monkeypatch.setenv("HOLDFAST_SECRET_KEY", secret)
    file = tmp_path / "file"
    file.write_text(secret)
    file.chmod(0o644)
    scripts = [
        f"cat {file}; exit 1",
        f"cat {file}; head -c 490 /dev/zero | tr '\\0' x; exit 1",
        f"head -c 65520 /dev/zero | tr '\\0' x; cat {file}; exit 1",
    ]
    jobs = [await workers.sh("true", secrets=["KEY"], check=check(script, 6.0)) for script in scripts]
    async with workers.worker():
        said = [await paused(workers, job) for job in jobs]
    assert "***" in said[0]
    for message in said:
        assert not any(secret[n : n + 6] in message for n in range(len(secret) - 5)), message


@pytest.mark.parametrize("host", ["a", "b"])
async def test_a_worker_killed_during_a_check_leaves_nothing_running(processes: WorkerProcesses, host: str) -> None:
    """An adopter on the same host ends the old check before its own; without one, it ends with the lease. What is left
    of it on disk is swept. Proves I1, R1.
    """
    pids, ready = processes.folder / "pids", processes.folder / "ready"
    script = f"[ -e {ready} ] && exit 0; {ESCAPE.format(pids=pids)} sleep 86399"
    processes.set(orphan_grace=1.0)
    job = await processes.sh("echo ran", check=check(script, 86_000.0), max_attempts=3)
    first = processes.start({"default": 1}, host="a")
    await eventually(_written(pids), "the check runs")
    first.signal(signal.SIGKILL)
    await first.dead()
    (old,) = pids.read_text().split()
    ready.touch()
    if host == "b":
        await processes.eventually(lambda: not alive(old), "what the check started is dead")
    processes.start({"default": 1}, host=host)
    if host == "b":
        await processes.ended(job, Status.PAUSED)
        await processes.store.jobs.resume(job.id, stopped=True)
    await processes.ended(job, Status.SUCCEEDED)
    assert not alive(old)
    assert await processes.log(job) == ["ran"]
    await processes.sweep("a", keep_marker_for=0.0)
    assert [folder for folder in processes.folders_of("a") if "check" in folder.name] == []


async def test_a_check_ends_with_the_lease_of_a_worker_that_sleeps(processes: WorkerProcesses) -> None:
    """Before another worker can go on with the job; and the sleeper starts nothing later. Proves I1, R3."""
    pids, ready = processes.folder / "pids", processes.folder / "ready"
    script = f"[ -e {ready} ] && exit 0; {ESCAPE.format(pids=pids)} sleep 86399"
    job = await processes.sh("echo ran", check=check(script, 86_000.0), max_attempts=3)
    sleeper = processes.start({"default": 1}, host="a")
    await eventually(_written(pids), "the check runs")
    sleeper.signal(signal.SIGSTOP)
    (old,) = pids.read_text().split()
    await processes.eventually(lambda: not alive(old), "the check is over")
    ready.touch()
    processes.start({"default": 1}, host="a")
    await processes.ended(job, Status.SUCCEEDED)
    sleeper.signal(signal.SIGCONT)
    await processes.eventually(lambda: "lease lost" in sleeper.log, "the sleeper hears of it")
    assert await processes.log(job) == ["ran"]
    assert len(pids.read_text().split()) == 1


def _written(path: Path) -> Callable[[], Any]:
    async def look() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(path).st_size > 0
        return False

    return look
