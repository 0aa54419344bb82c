"""Late starts: a worker that lost its lease starts the job after others have ended it.

The test acts as the first owner: it claims and stages the job, and starts it late. A real worker adopts.
"""

import asyncio
import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Claimable, Job, Status
from holdfast.runner.attempt_folder import AttemptFolder
from holdfast.runner.base import AttemptHandle, Identity, StartRequest, StartTooLate
from holdfast.runner.launcher import Launcher
from holdfast.runner.process import ProcessRunner
from holdfast.runner.state_folder import StateFolder
from holdfast.worker import attempt_start
from holdfast.worker.held_leases import boottime
from tests.support.crashing_worker import Hook
from tests.support.in_process_workers import InProcessWorkers
from tests.support.worker_processes import WorkerProcesses

OWNER = "first-owner"
MARK = 'echo $$ >> "$MARKER"'


class LateOwner:
    """A worker that claimed a job under a lease of a minute, and has not started it yet."""

    def __init__(self, processes: WorkerProcesses, job: Job) -> None:
        self._processes = processes
        self._job = job
        state = StateFolder(processes.host("a"))
        self._domain = state.domain
        self._runner = ProcessRunner(state, processes.installation, user=None, log_cap=1 << 20)
        self.folder = processes.folder_of(job)

    async def claim(self) -> None:
        pair = Claimable(queue=self._job.queue, capability="process", domain=self._domain)
        (lease,) = (await self._processes.store.leases.claim(OWNER, [pair], slots=1, ttl=60)).claimed
        self._order = StartRequest(
            identity=Identity(self._processes.installation, lease.id, lease.attempt),
            domain=lease.domain,
            token=lease.token,
            spec=lease.spec,
            inputs=lease.inputs,
            start_by=boottime() + 54,
        )

    def stage(self) -> AttemptFolder:
        self._runner.staging.stage(self.folder, self._order)
        return self.folder

    async def lose(self) -> None:
        """Clear its lease early, as if it were known to be dead or the database's clock had jumped."""
        await self._processes.store.leases.orphan(OWNER)

    async def start(self) -> None:
        """Start its supervisor, and wait for its end."""
        pid = self.folder.start()
        await asyncio.to_thread(os.waitpid, pid, 0)
        self._runner.close()


async def late_owner(processes: WorkerProcesses, name: str) -> tuple[Job, LateOwner]:
    job = await processes.sh(MARK, env={"MARKER": processes.marker(name)}, queue=name)
    owner = LateOwner(processes, job)
    await owner.claim()
    return job, owner


async def test_supervisor_on_its_way_does_not_start_a_cancelled_job(processes: WorkerProcesses) -> None:
    job, owner = await late_owner(processes, "cancelled")
    owner.stage()
    await processes.store.jobs.cancel(job.id)
    await owner.lose()
    processes.start({"other": 1})
    await processes.ended(job, Status.CANCELLED)
    await owner.start()
    assert processes.marker_lines("cancelled") == []


async def test_swept_attempt_is_not_started_again(processes: WorkerProcesses) -> None:
    job, owner = await late_owner(processes, "swept")
    await owner.lose()
    adopter = processes.start({"other": 1}, Hook(step="finished", do="kill"))
    await adopter.dead()
    await processes.ended(job, Status.SUCCEEDED)
    await processes.sweep()
    owner.stage()
    await owner.start()
    assert len(processes.marker_lines("swept")) == 1


async def test_late_supervisor_costs_no_attempt(processes: WorkerProcesses) -> None:
    job, owner = await late_owner(processes, "left")
    folder = owner.stage()
    lock = os.open(folder.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        await owner.lose()
        processes.start({"other": 1})
        # A worker that sends a command to the owner of the lock is wrong, and what it breaks shows below. One that
        # waits for the lock, as it should, never sends: then the limit ends this wait.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await processes.eventually(lambda: list((folder.path / "cmd").iterdir()), "a command")
    finally:
        os.close(lock)
    await processes.ended(job, Status.SUCCEEDED)
    assert len(processes.marker_lines("left")) == 1


class LateStarts:
    """Make the first starts fail with `StartTooLate`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tries: float) -> None:
        self.tried = asyncio.Event()
        start = ProcessRunner.start

        async def late(runner: ProcessRunner, *args: Any) -> AttemptHandle:
            nonlocal tries
            tries -= 1
            if tries < 0:
                return await start(runner, *args)
            self.tried.set()
            raise StartTooLate

        monkeypatch.setattr(ProcessRunner, "start", late)


async def test_job_with_repeated_late_starts_can_be_cancelled(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves C1: a stop request is carried out in the pause between two tries."""
    late = LateStarts(monkeypatch, float("inf"))
    job = await workers.sh("true")
    async with workers.worker():
        await late.tried.wait()
        await workers.store.jobs.cancel(job.id)
        assert (await workers.ended(job, Status.CANCELLED)).attempts == 0


async def test_late_start_is_retried_in_the_same_attempt(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L13."""
    LateStarts(monkeypatch, 2)
    job = await workers.sh("true")
    async with workers.worker():
        assert (await workers.ended(job, Status.SUCCEEDED)).attempts == 1


async def test_job_that_never_starts_in_time_fails(workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves R22: on an overloaded machine the job fails with this reason, and its policy decides."""
    monkeypatch.setattr(attempt_start, "LATE_SECONDS", 0.01)
    LateStarts(monkeypatch, float("inf"))
    job = await workers.sh("true")
    async with workers.worker():
        failed = await workers.ended(job, Status.FAILED)
    assert failed.error is not None
    assert (failed.error.code, failed.exit_code) == ("start_failed", None)
    assert "took longer than the lease allows" in failed.error.message


async def test_start_after_the_lease_expired_starts_nothing(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Proves L15: the deadline of a start is set when the order is made, not when it is carried out.

    The worker stalls for longer than the lease before the spawn, so its supervisor must exit. A launcher that stalls is
    in test_launcher_crash.py.
    """
    monkeypatch.setattr(Launcher, "usable", False)
    workers.set(lease_ttl=3.0, heartbeat_interval=0.5)
    marker = tmp_path / "marker"
    ran: list[str] = []
    stage_and_spawn = ProcessRunner._stage_and_spawn

    def stalled(runner: ProcessRunner, folder: AttemptFolder, order: StartRequest) -> int:
        if ran:
            ran.append(marker.read_text() if marker.exists() else "")
            return stage_and_spawn(runner, folder, order)
        ran.append("")
        made = boottime()
        while boottime() <= made + workers.settings.lease_ttl:
            time.sleep(0.01)  # Reason: this is the stall.
        return stage_and_spawn(runner, folder, order)

    monkeypatch.setattr(ProcessRunner, "_stage_and_spawn", stalled)
    job = await workers.sh(MARK, env={"MARKER": str(marker)})
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert len(ran) >= 2, "the first supervisor was too late, so there was another start"
    assert set(ran) == {""}, "no start before the last ran the command"
    assert (len(marker.read_text().split()), ended.attempts) == (1, 1)
