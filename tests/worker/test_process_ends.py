"""Ends of processes in a worker: each cause is recorded, stops step by step, starts that fail."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Cause, Status
from holdfast.runner.attempt_folder import AttemptFolder, write_new
from holdfast.runner.launcher import Launch, Launcher, LaunchFailed, LaunchRecords
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.supervisor_harness import running as alive


async def test_a_command_that_cannot_run_fails_at_once_and_is_not_retried(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """The message names the command, and nothing is left. Proves R17."""
    script = tmp_path / "script"
    script.write_text("echo hi")
    jobs = {
        "no-such-command": await workers.command("no-such-command", max_attempts=5),
        str(script): await workers.command(str(script), max_attempts=5),
        "/": await workers.command("/", max_attempts=5),
    }
    async with workers.worker():
        for name, job in jobs.items():
            ended = await workers.ended(job, Status.FAILED)
            assert ended.error is not None
            assert ended.error.code == "command_missing"
            assert name in ended.error.message
            assert ended.attempts == 1
    assert workers.folders == []


async def test_attempts_record_every_cause_of_an_end(workers: InProcessWorkers) -> None:
    """Proves R20, R8, R9."""
    quick: Any = {"stop_grace": 0.2}
    jobs = {
        Cause.EXIT: await workers.sh("exit 3"),
        Cause.TIMED_OUT: await workers.sh("echo partial; sleep 60", timeout=3, **quick),
        Cause.IDLE_TIMEOUT: await workers.sh("sleep 60", idle_timeout=0.3, **quick),
        Cause.START_FAILED: await workers.command("no-such-command"),
        Cause.CANCELLED: await workers.sh("echo up; sleep 60", **quick),
        Cause.INTERRUPTED: await workers.sh("echo up; sleep 60", **quick),
        Cause.LOST: await workers.sh("echo up; sleep 60", **quick),
    }
    by_signal = await workers.sh("kill -SEGV $$")
    async with workers.worker():
        for cause in (Cause.CANCELLED, Cause.INTERRUPTED, Cause.LOST):
            await workers.wait_for_log(jobs[cause], "up")
        await workers.store.jobs.cancel(jobs[Cause.CANCELLED].id)
        await workers.store.jobs.interrupt(jobs[Cause.INTERRUPTED].id)
        (folder,) = [folder for folder in workers.folders if jobs[Cause.LOST].id in folder.name]
        started = AttemptFolder(folder).started()
        assert started is not None
        os.kill(started.supervisor_pid, signal.SIGKILL)
        for job in (*jobs.values(), by_signal):
            await workers.ended(job)
    ends = {}
    for cause, job in jobs.items():
        (attempt,) = await workers.store.attempts.list(job.id)
        assert attempt.cause is cause
        ends[cause] = (attempt.exit_code, (await workers.get(job)).status, attempt.error and attempt.error.code)
    assert ends == {
        Cause.EXIT: (3, Status.FAILED, "exit_nonzero"),
        Cause.TIMED_OUT: (124, Status.TIMED_OUT, "timed_out"),
        Cause.IDLE_TIMEOUT: (124, Status.TIMED_OUT, "idle_timeout"),
        Cause.START_FAILED: (None, Status.FAILED, "command_missing"),
        Cause.CANCELLED: (None, Status.CANCELLED, "cancelled"),
        Cause.INTERRUPTED: (None, Status.PAUSED, "interrupted"),
        Cause.LOST: (None, Status.FAILED, "lost"),
    }
    (attempt,) = await workers.store.attempts.list(by_signal.id)
    assert (attempt.cause, attempt.signal, attempt.exit_code) == (Cause.EXIT, signal.SIGSEGV, None)
    assert await workers.log(jobs[Cause.TIMED_OUT]) == ["partial"]


async def test_a_job_that_fails_is_run_again_in_a_folder_of_its_own(workers: InProcessWorkers) -> None:
    """Attempt 2 knows nothing of attempt 1. Proves R1, L13."""
    script = "echo attempt $HOLDFAST_ATTEMPT; ls; touch was-here; [ $HOLDFAST_ATTEMPT = 2 ]"
    job = await workers.sh(script, max_attempts=3, retry={"base": 0.01, "cap": 0.01})
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert await workers.log(job) == ["attempt 1", "output", "request.json", "attempt 2", "output", "request.json"]
    assert ended.attempts == 2


async def test_stop_sequence_records_each_step(workers: InProcessWorkers) -> None:
    """A child that ignores TERM is killed. Proves C4, R25: what left the group is gone too."""
    script = "trap '' TERM; setsid sh -c 'trap \"\" TERM; echo pid=$$; sleep 600' & echo up; wait; sleep 600"
    job = await workers.sh(script, stop_grace=0.3)
    async with workers.worker():
        await workers.wait_for_log(job, "up")

        async def pid() -> int | None:
            found = [line for line in await workers.log(job) if line.startswith("pid=")]
            return int(found[0].removeprefix("pid=")) if found else None

        grandchild = await eventually(pid, "the grandchild says who it is")
        await workers.store.jobs.cancel(job.id, by="someone")
        await workers.ended(job, Status.CANCELLED)
    phases = [event.data["cancel"] for event in await workers.events(job, "cancel")]
    assert phases == ["requested", "signalled", "killed", "dead"]
    assert not alive(grandchild)


async def test_over_its_budget_a_process_is_stopped_and_not_retried(workers: InProcessWorkers) -> None:
    """Proves C6, C7."""
    script = 'while :; do echo \'{"event":"usage","tokens":30}\'; sleep 0.05; done'
    job = await workers.sh(script, budget={"tokens": 100}, max_attempts=4, stop_grace=1)
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert (ended.error.code, ended.attempts) == ("budget_exceeded", 1)
    assert "of 100" in ended.error.message
    assert ended.usage["tokens"] > 100


async def test_a_folder_that_cannot_be_made_fails_the_start_with_the_reason(workers: InProcessWorkers) -> None:
    """Proves R12, R17: nothing half made is left."""
    job = await workers.sh("echo hi")
    async with workers.worker() as worker:
        root = workers.settings.state / "attempts" / await workers.store.installation()
        root.rmdir()
        root.write_text("in the way")
        bad = await workers.sh("echo hi")
        ended = await workers.ended(bad, Status.FAILED)
        assert worker.id
        root.unlink()
        root.mkdir()
    assert ended.error is not None
    assert ended.error.code == "start_failed"
    assert "cannot prepare the attempt's folder" in ended.error.message
    assert (await workers.get(job)).status in (Status.SUCCEEDED, Status.FAILED)


@pytest.mark.parametrize("code", [120, 121, 122, 123, 124, 125])
async def test_exit_codes_that_a_supervisor_uses_itself_are_the_commands_own(
    workers: InProcessWorkers, code: int
) -> None:
    job = await workers.sh(f"exit {code}")
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert (ended.exit_code, ended.attempts) == (code, 1)


@pytest.mark.parametrize("launched", [True, False], ids=["launched", "staged"])
async def test_full_host_fails_no_job(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    """It waits for a better moment, and no attempt is counted. Proves R5 for a host."""
    full = [errno.ENOSPC, errno.EMFILE]
    launch = Launcher.launch

    def exhausted(path: str | Path, data: bytes) -> None:
        if full:
            raise OSError(full.pop(), "no room")
        write_new(path, data)

    async def failed(self: Launcher, records: LaunchRecords, *, within: float) -> Launch:
        if full:
            raise LaunchFailed(full.pop())
        return await launch(self, records, within=within)

    monkeypatch.setattr(Launcher, "launch", failed)
    monkeypatch.setattr(Launcher, "usable", launched)
    monkeypatch.setattr("holdfast.runner.process_staging.write_new", exhausted)
    monkeypatch.setattr("holdfast.runner.process.EXHAUSTED_SECONDS", 0.2)
    monkeypatch.setattr("holdfast.worker.attempt_execution.AWAY_SECONDS", 0.1)
    job = await workers.sh("echo ran")
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, await workers.log(job), full) == (1, ["ran"], [])


async def test_a_stop_after_that_no_heartbeat_can_renew_is_refused(workers: InProcessWorkers) -> None:
    job = await workers.sh("sleep 60", stop_after=1.5, max_attempts=5)
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert ended.error.code == "contract_violation"
    assert "at least 2 s" in ended.error.message
