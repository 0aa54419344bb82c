"""A launcher that is killed, stopped or missing: every attempt runs once, and none is lost."""

import asyncio
import ctypes
import fcntl
import os
import shutil
import signal
import stat
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.model import Status
from holdfast.runner import launcher, supervisor
from holdfast.runner.helper_process import HelperProcess
from holdfast.runner.process import ProcessRunner
from holdfast.worker.worker import Worker
from tests.support.crashing_worker import Hook
from tests.support.in_process_workers import InProcessWorkers
from tests.support.worker_processes import WorkerProcesses

MARK = 'echo $$ >> "$MARKER"'
STEPS = ["recvfrom:1", "clone:1", "clone:2", "wait4:1", "wait4:3", "openat:3", "openat:4", "sendto:1", "sendto:2"]
"""System calls of the launcher itself at which it is killed: at the first of that name, the second, …"""
PROGRAM = supervisor.path()
PIDFD_GETFD = 438
WORKER_SOCKET = 3
"""The number of a system call, and the descriptor of a launcher's socket."""


def launcher_of(worker: Worker) -> HelperProcess:
    runner = worker.capabilities.runners["process"]
    assert isinstance(runner, ProcessRunner)
    assert runner.launcher._process is not None
    return runner.launcher._process


def wrapped(folder: Path, script: str) -> Callable[[], Path]:
    """Make a program in place of the supervisor's: a script that ends by becoming it."""
    program = folder / "holdfast-supervisor"
    program.write_text(f'#!/bin/sh\n{script}\nexec {PROGRAM} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return lambda: program


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("step", STEPS)
async def test_launcher_killed_at_any_step_costs_nothing(
    workers: InProcessWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Proves L13, R2, R12: each job runs once, in its first attempt, and the next launcher goes on."""
    call, _, number = step.partition(":")
    killed = tmp_path / "killed"
    trace = f"-e trace={call} -e inject={call}:signal=KILL:when={number}"
    once = f'if [ "$1" = --launch ] && mkdir {killed}; then exec strace -o {tmp_path}/trace {trace} {PROGRAM} "$@"; fi'
    monkeypatch.setattr(supervisor, "path", wrapped(tmp_path, once))
    jobs = {}
    for n in range(6):
        jobs[n] = await workers.sh(f"{MARK}; echo said {n}", env={"MARKER": str(tmp_path / f"marker.{n}")})
    async with workers.worker({"default": 3}):
        for n, job in jobs.items():
            ended = await workers.ended(job, Status.SUCCEEDED)
            assert (ended.attempts, await workers.log(job)) == (1, [f"said {n}"])
    assert killed.exists()
    assert "killed by SIGKILL" in (tmp_path / "trace").read_text()
    assert [len((tmp_path / f"marker.{n}").read_text().split()) for n in jobs] == [1] * len(jobs)


async def test_attempts_run_on_when_their_launcher_is_killed(workers: InProcessWorkers, tmp_path: Path) -> None:
    """They are watched as adopted ones are; another launcher starts the next."""
    gate = tmp_path / "gate"
    wait = f"echo begun; while [ ! -e {gate} ]; do sleep 0.02; done; echo over; echo kept > output/file; exit 3"
    async with workers.worker() as worker:
        jobs = [await workers.sh(wait) for _ in range(3)]
        for job in jobs:
            await workers.wait_for_log(job, "begun")
        first = launcher_of(worker)
        os.kill(first.pid, signal.SIGKILL)
        await workers.ended(await workers.sh("true"), Status.SUCCEEDED)
        assert launcher_of(worker).pid != first.pid
        gate.touch()
        for job in jobs:
            ended = await workers.ended(job, Status.FAILED)
            assert (ended.exit_code, ended.attempts, await workers.log(job)) == (3, 1, ["begun", "over"])
    assert workers.folders == []


async def test_running_attempt_can_be_cancelled_without_its_launcher(workers: InProcessWorkers) -> None:
    async with workers.worker() as worker:
        job = await workers.sh("echo begun; sleep 600")
        await workers.wait_for_log(job, "begun")
        os.kill(launcher_of(worker).pid, signal.SIGKILL)
        await workers.store.jobs.cancel(job.id)
        assert (await workers.ended(job, Status.CANCELLED)).attempts == 1


@pytest.mark.parametrize("wakes", [False, True], ids=["killed", "wakes"])
async def test_launcher_stopped_beyond_the_deadline_starts_nothing_twice(
    workers: InProcessWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wakes: bool
) -> None:
    """Proves L15: it does not answer until the lease is over. If it wakes then, it finds the deadline passed."""
    workers.set(lease_ttl=2.0, heartbeat_interval=0.3)
    monkeypatch.setattr(launcher, "REPLY_SECONDS", 600.0)
    kills = asyncio.Event()
    kill = HelperProcess.kill

    def spare(self: HelperProcess) -> None:
        kills.set()
        if not wakes:
            kill(self)

    monkeypatch.setattr(HelperProcess, "kill", spare)
    marker = tmp_path / "marker"
    async with workers.worker() as worker:
        await workers.ended(await workers.sh("true"), Status.SUCCEEDED)
        stopped = launcher_of(worker)
        os.kill(stopped.pid, signal.SIGSTOP)
        job = await workers.sh(MARK, env={"MARKER": str(marker)})
        await kills.wait()
        ended = await workers.ended(job, Status.SUCCEEDED)
        if wakes:
            os.kill(stopped.pid, signal.SIGCONT)
            # The launcher carries out its messages in order: after this one, it has carried out the late one.
            await workers.ended(await workers.sh("true"), Status.SUCCEEDED)
    assert (ended.attempts, len(marker.read_text().split())) == (1, 1)
    assert workers.folders == []


async def test_worker_killed_with_a_start_in_flight_costs_nothing(processes: WorkerProcesses) -> None:
    """Proves L13, L15: the launcher is stopped with the message, its worker is killed, then it wakes."""
    slow: dict[str, Any] = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}
    victim = processes.start({"first": 1, "second": 1}, adopts=False, **slow)
    await processes.ended(await processes.sh("true", queue="first"), Status.SUCCEEDED)
    helper = await processes.eventually(lambda: launcher_below(victim.pid), "the worker has a launcher")
    os.kill(helper, signal.SIGSTOP)
    job = await processes.chatty("flight", queue="second")
    await processes.leaves(job, Status.QUEUED)
    await processes.eventually(lambda: has_unread_message(helper), "the message is sent")
    victim.signal(signal.SIGKILL)
    await victim.dead()
    os.kill(helper, signal.SIGCONT)
    processes.start({"other": 1}, **slow)
    await processes.assert_whole("flight", job)
    await processes.eventually(lambda: not Path(f"/proc/{helper}").exists(), "the launcher exits with its worker")


@pytest.mark.parametrize("step", ["prepared", "spawned"])
async def test_launcher_and_worker_killed_together_cost_nothing(processes: WorkerProcesses, step: str) -> None:
    """Supervisors depend on neither. Proves L13, R3."""
    held = processes.folder / "held"
    slow: dict[str, Any] = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}
    victim = processes.start({"a": 2}, Hook(step=step, do="wait", path=str(held)), adopts=False, **slow)
    job = await processes.chatty("both", queue="a")
    await processes.eventually(lambda: Path(f"{held}.here").exists(), "the worker waits at the step")
    if (helper := launcher_below(victim.pid)) is not None:
        os.kill(helper, signal.SIGKILL)
    victim.signal(signal.SIGKILL)
    await victim.dead()
    processes.start({"other": 1}, **slow)
    await processes.assert_whole("both", job)


async def test_jobs_run_without_a_launcher(
    workers: InProcessWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has no launcher exits at once: after some tries, the worker starts supervisors itself."""
    tries = tmp_path / "tries"
    refuse = f'if [ "$1" = --launch ]; then echo try >> {tries}; exit 64; fi'
    monkeypatch.setattr(supervisor, "path", wrapped(tmp_path, refuse))
    async with workers.worker({"default": 1}):
        for n in range(6):
            job = await workers.sh(f"echo {n}")
            assert (await workers.ended(job, Status.SUCCEEDED)).attempts == 1
            assert await workers.log(job) == [str(n)]
    assert len(tries.read_text().split()) == launcher.QUICK_DEATHS


async def test_missing_program_is_named(workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ConfigError(["the supervisor is not built: python -m holdfast.runner.supervisor.build"])

    monkeypatch.setattr(supervisor, "path", missing)
    job = await workers.sh("true")
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert ended.error.code == "start_failed"
    assert "the supervisor is not built" in ended.error.message


def launcher_below(worker: int) -> int | None:
    """Return the pid of a worker's launcher."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == worker and b"--launch" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
        except OSError:
            continue
    return None


def has_unread_message(helper: int) -> bool:
    """Return whether a stopped launcher has a message to read, by a copy of its socket."""
    pidfd = os.pidfd_open(helper)
    try:
        copy = ctypes.CDLL(None).syscall(PIDFD_GETFD, pidfd, WORKER_SOCKET, 0)
    finally:
        os.close(pidfd)
    assert copy >= 0
    try:
        return fcntl.ioctl(copy, termios.FIONREAD, bytes(4)) != bytes(4)
    finally:
        os.close(copy)
