"""Ends without a worker and ends on request: dead supervisors, time limits, cancels, SIGTERM."""

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.model import Cause, Job, Status
from holdfast.runner.base import AttemptEnd, Identity, StartRequest, StartTooLate
from holdfast.runner.process import ProcessRunner
from holdfast.runner.process_handle import ProcessHandle
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.wire import Command
from holdfast.worker.held_leases import boottime
from tests.support.crashing_worker import Hook
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.worker_processes import WorkerProcesses, alive

LONG = 'echo $$ >> "$MARKER"; setsid sleep 1000 & echo $! >> "$MARKER"; echo begun; wait'
"""A child, and a grandchild that has left its session; both are marked."""
ONCE: dict[str, Any] = {"retry": {"base": 0.1, "cap": 0.1, "on": ["failed"]}}


async def long(processes: WorkerProcesses, name: str, script: str = LONG, **fields: Any) -> Job:
    return await processes.sh(script, env={"MARKER": processes.marker(name)}, **fields)


async def gone(processes: WorkerProcesses, name: str) -> None:
    await processes.eventually(
        lambda: not any(alive(pid) for pid in processes.marker_lines(name)), f"{name}: its processes are gone"
    )


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
async def test_killed_supervisor_is_a_loss_and_on_lost_decides(processes: WorkerProcesses, watched: bool) -> None:
    """Proves L11, R22, R1, L13: lost and run again counts two, nothing of the first attempt is left, none succeeded."""
    second = f'[ "$HOLDFAST_ATTEMPT" = 2 ] && exit 0; {LONG}'
    jobs = {
        "requeue": await long(processes, "requeue", second, max_attempts=2, **ONCE),
        "none left": await long(processes, "none left", **ONCE),
        "fail": await long(processes, "fail", max_attempts=2, on_lost="fail"),
        "hold": await long(processes, "hold", max_attempts=2, on_lost="hold"),
    }
    worker = processes.start({"default": 4})
    for name, job in jobs.items():
        await processes.wait_for_marker(name, 2)
        await processes.running(job)
    if not watched:
        worker.kill()
    for job in jobs.values():
        os.kill(processes.supervisor_of(job), signal.SIGKILL)
    if not watched:
        processes.start({"default": 4})
    ended = {name: await processes.ended(job) for name, job in jobs.items()}
    assert {name: job.status for name, job in ended.items()} == {
        "requeue": Status.SUCCEEDED,
        "none left": Status.FAILED,
        "fail": Status.FAILED,
        "hold": Status.PAUSED,
    }
    assert [job.error and job.error.code for job in ended.values()] == [None, "lost", "lost", "lost"]
    assert [job.attempts for job in ended.values()] == [2, 1, 1, 1]
    for name, job in jobs.items():
        assert (await processes.store.attempts.list(job.id))[0].cause is Cause.LOST
        assert not any(alive(pid) for pid in processes.marker_lines(name)), name
        await processes.assert_true(job)


async def test_supervisor_killed_while_its_child_ends_is_never_a_success(processes: WorkerProcesses) -> None:
    """Proves R22. The child ended well, but nobody saw it."""
    job = await long(
        processes, "ends", 'echo $$ >> "$MARKER"; while [ ! -e "$MARKER.go" ]; do sleep 0.05; done; exit 0'
    )
    processes.start({"default": 1})
    (child,) = await processes.wait_for_marker("ends")
    supervisor = processes.supervisor_of(job)
    os.kill(supervisor, signal.SIGSTOP)
    processes.touch("ends.marker.go")
    await gone(processes, "ends")
    os.kill(supervisor, signal.SIGKILL)
    ended = await processes.ended(job, Status.FAILED)
    assert ended.error is not None
    assert ended.error.code == "lost"
    assert not alive(child)


async def test_limits_of_time_hold_with_no_worker_alive(processes: WorkerProcesses) -> None:
    """Proves R8, R9, R3: sleeper and grandchild gone, `timed_out`, 124, and what it had said is kept."""
    jobs = {
        "timeout": await long(processes, "timeout", timeout=12.0, stop_grace=0.5),
        "stubborn": await long(processes, "stubborn", f"trap '' TERM; {LONG}; wait", timeout=12.0, stop_grace=0.5),
        "idle": await long(processes, "idle", idle_timeout=12.0, stop_grace=0.5),
    }
    worker = processes.start({"default": 3})
    for name, job in jobs.items():
        await processes.wait_for_marker(name, 2)
        await processes.running(job)
    worker.kill()
    for name in jobs:
        await gone(processes, name)
    processes.start({"default": 3})
    for name, job in jobs.items():
        ended = await processes.ended(job, Status.TIMED_OUT)
        assert ended.exit_code == 124, name
        assert ended.error is not None
        assert ended.error.code == ("idle_timeout" if name == "idle" else "timed_out")
        assert await processes.log(job) == ["begun"]
        assert len(processes.marker_lines(name)) == 2


async def test_process_that_has_a_reused_pid_is_not_signalled(processes: WorkerProcesses) -> None:
    """Proves R7. The recorded pids of the dead attempt belong to another process now."""
    job = await long(processes, "lost")
    worker = processes.start({"default": 1})
    await processes.wait_for_marker("lost", 2)
    await processes.running(job)
    worker.kill()
    os.kill(processes.supervisor_of(job), signal.SIGKILL)
    innocent = await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True)
    try:
        path = processes.folder_of(job).path / "started"
        started = json.loads(path.read_text())
        path.write_text(json.dumps({
            **started, "supervisor_pid": innocent.pid, "child_pid": innocent.pid, "child_session": innocent.pid,
        }))  # fmt: skip
        processes.start({"default": 1})
        ended = await processes.ended(job, Status.FAILED)
        assert ended.error is not None
        assert ended.error.code == "lost"
        await gone(processes, "lost")
        assert innocent.returncode is None
    finally:
        innocent.kill()
        await innocent.wait()


async def test_after_a_reboot_running_attempts_are_lost_and_ended_ones_collected(processes: WorkerProcesses) -> None:
    """Proves R6, R2. The test simulates a reboot: everything dies, and the next worker gets another boot id."""
    ran = await long(processes, "ran")
    ended = await processes.chatty("ended", gated=True)
    worker = processes.start({"default": 2})
    await processes.wait_for_marker("ran", 2)
    await processes.wait_for_marker("ended")
    await processes.running(ran)
    await processes.running(ended)
    worker.kill()
    processes.open_gate("ended")
    await processes.eventually(lambda: processes.folder_of(ended).exit(), "it ends")
    os.kill(processes.supervisor_of(ran), signal.SIGKILL)
    os.kill(int(processes.marker_lines("ran")[1]), signal.SIGKILL)
    processes.start({"default": 2}, boot="another")
    lost = await processes.ended(ran, Status.FAILED)
    assert lost.error is not None
    assert (lost.error.code, lost.error.message) == ("lost", "the host was rebooted")
    await processes.assert_whole("ended", ended)


async def test_sigterm_hands_over_processes_and_lets_functions_end(processes: WorkerProcesses) -> None:
    """Proves C9, L13: adopted at once and started once; a drained attempt does not count."""
    process = await processes.chatty("process", gated=True, queue="work")
    short = await processes.submit("nap", inputs={"path": processes.marker("short"), "seconds": 1.0}, queue="work")
    endless = await processes.submit("nap", inputs={"path": processes.marker("endless"), "seconds": 60.0}, queue="work")
    leaver = processes.start({"work": 3}, drain_grace=3.0)
    for name in ("process", "short", "endless"):
        await processes.wait_for_marker(name)
    processes.start({"other": 1})
    await processes.running(process)
    await processes.eventually(lambda: len(processes.locks()) == 2, "the other is there")
    leaver.signal(signal.SIGTERM)
    assert await leaver.dead() == 0
    processes.open_gate("process")
    await processes.assert_whole("process", process)
    handed, adopted = await processes.events(process, "lease")
    assert (handed.data["lease"], adopted.data["lease"]) == ("handed_over", "adopted")
    assert (adopted.at - handed.at).total_seconds() < 2
    assert (await processes.get(short)).status is Status.SUCCEEDED
    assert len(processes.marker_lines("short")) == 2
    drained = await processes.get(endless)
    assert (drained.status, drained.attempts, drained.attempt) == (Status.QUEUED, 0, 1)
    assert [attempt.cause for attempt in await processes.store.attempts.list(endless.id)] == [Cause.DRAINED]
    assert len(processes.locks()) == 1


async def test_orphans_of_a_stopped_worker_are_explained_and_name_it(processes: WorkerProcesses) -> None:
    """Proves J17: a stop in order is no loss, a killed worker is not said to run its job, the record names each."""
    job = await processes.chatty("process", gated=True)

    async def why(text: str) -> bool:
        (reason,) = (await processes.store.explain.job(job.id)).reasons
        return text in reason.message

    first = processes.start({"default": 1})
    await processes.wait_for_marker("process")
    await processes.running(job)
    began = (await processes.store.attempts.list(job.id))[0].worker
    assert await why(f"attempt 1 runs on worker {began}; last heartbeat")
    first.signal(signal.SIGTERM)
    assert await first.dead() == 0
    assert await why(f"worker {began} stopped and handed attempt 1 over")
    assert await why(": start one there")
    second = processes.start({"default": 1})
    await eventually(lambda: processes.leases(job, "adopted"), "it is adopted")
    adopter = (await processes.store.attempts.list(job.id))[0].last_worker
    assert adopter != began
    second.kill()
    await second.dead()
    await eventually(lambda: why(f"worker {adopter} has sent no heartbeat for"), "it is silent")
    await eventually(lambda: why(f"the lease of worker {adopter} expired"), "its lease has expired")
    assert await why(": start one there")
    processes.start({"default": 1})
    processes.open_gate("process")
    await processes.assert_whole("process", job)
    (attempt,) = await processes.store.attempts.list(job.id)
    assert (attempt.worker, attempt.last_worker in (None, began, adopter)) == (began, False)


async def test_second_signal_exits_immediately(processes: WorkerProcesses) -> None:
    """Proves C9. What it held is recovered from its lock file, not after its lease."""
    process = await processes.chatty("process", gated=True)
    endless = await processes.submit(
        "nap", inputs={"path": processes.marker("endless"), "seconds": 60.0}, queue="work", on_lost="hold"
    )
    leaver = processes.start({"default": 1, "work": 1}, drain_grace=60.0, lease_ttl=600.0)
    await processes.wait_for_marker("endless")
    await processes.running(process)
    leaver.signal(signal.SIGTERM)
    await eventually(lambda: processes.leases(process, "handed_over"), "it hands over")
    leaver.signal(signal.SIGTERM)
    assert await leaver.dead() == 1
    processes.open_gate("process")
    processes.start({"other": 1})
    await processes.assert_whole("process", process)
    assert (await processes.ended(endless, Status.PAUSED)).error is not None


async def test_cancel_reaches_the_child_though_the_canceller_is_killed_at_once(processes: WorkerProcesses) -> None:
    """Proves C5, C1, C4, R25: all that it started is gone, it is not retried, and a resume is not cancelled again."""
    script = f'[ "$HOLDFAST_ATTEMPT" = 2 ] && exit 0; trap "exit 1" TERM; {LONG}'
    job = await long(processes, "job", script, max_attempts=3, stop_grace=1.0, **ONCE)
    processes.start({"default": 1})
    await processes.wait_for_marker("job", 2)
    await processes.running(job)
    canceller = (
        "import asyncio, os, sys\n"
        "from holdfast.store import open_store\n"
        "async def main():\n"
        "    await (await open_store(sys.argv[1])).jobs.cancel(sys.argv[2])\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", canceller, str(processes.settings.database_url), job.id], check=False
    )
    assert done.returncode == -signal.SIGKILL
    ended = await processes.ended(job, Status.CANCELLED)
    assert ended.attempts == 1
    assert not any(alive(pid) for pid in processes.marker_lines("job"))
    assert (await processes.cancels(job))[:2] == ["requested", "signalled"]
    assert (await processes.cancels(job))[-1] == "dead"
    await processes.store.jobs.resume(job.id)
    assert (await processes.ended(job, Status.SUCCEEDED)).attempts == 2


async def test_cancel_that_races_the_start_wins(processes: WorkerProcesses) -> None:
    """Proves C2, L13. The job was claimed already, and nothing starts; that is no attempt."""
    go = str(processes.folder / "go")
    job = await processes.chatty("job")
    other = await processes.chatty("other", queue="other")
    processes.start({"default": 1, "other": 1}, Hook(step="claimed", do="wait", job=job.id, path=go))
    await processes.eventually(lambda: os.path.exists(f"{go}.here"), "the worker has claimed it")
    await processes.store.jobs.cancel(job.id)
    processes.touch("go")
    ended = await processes.ended(job, Status.CANCELLED)
    assert ended.attempts == 0
    assert processes.marker_lines("job") == []
    await processes.assert_whole("other", other)


async def test_unkillable_job_is_not_called_cancelled(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R23. It stays running and holds its lane until it is dead."""
    refuses, collect = True, ProcessHandle.collect

    async def refuse(process: ProcessHandle) -> AttemptEnd | None:
        return None if refuses else await collect(process)

    monkeypatch.setattr(ProcessHandle, "collect", refuse)
    async with workers.worker():
        job = await workers.sh("echo begun; sleep 1000", lane="l")
        later = await workers.sh("true", lane="l")
        await workers.wait_for_log(job, "begun")
        await workers.store.jobs.cancel(job.id)
        await eventually(lambda: _reached_phase(workers, job, "not_dead"), "it is told")
        await asyncio.sleep(0.5)  # Reason: time in which it would wrongly be called cancelled.
        assert (await workers.get(job)).status is Status.RUNNING
        assert (await workers.get(later)).started_at is None
        refuses = False
        await workers.ended(job, Status.CANCELLED)
        await workers.ended(later, Status.SUCCEEDED)
    assert await _reached_phase(workers, job, "dead")


async def _reached_phase(workers: InProcessWorkers, job: Job, phase: str) -> bool:
    return phase in [event.data["cancel"] for event in await workers.events(job, "cancel")]


async def _no_doubt() -> None:
    """The record says that the attempt is still ours."""


async def test_worker_that_slept_just_before_the_start_starts_nothing(tmp_path: Path) -> None:
    """Proves L15. Its lease is over, or others ran the attempt and cleaned up; removed files cause no error."""
    runner = ProcessRunner(StateFolder(tmp_path), "site", user=None, log_cap=1 << 20)
    spec = {"command": ["sh", "-c", f"echo ran >> {tmp_path}/marker"]}
    order = StartRequest(
        identity=Identity("site", "job", 1), domain=runner.domain, token=1, spec=spec, inputs={}, start_by=1e9
    )
    try:
        with pytest.raises(StartTooLate):
            await runner.start(msgspec.structs.replace(order, start_by=boottime() - 0.01), _no_doubt)
        adopter = await runner.start(msgspec.structs.replace(order, token=2), _no_doubt)
        adopter.watch(lambda: None)
        await eventually(adopter.collect, "it ends")
        await adopter.remove(had_other_owners=True)
        await adopter.send(Command(token=1, verb="hold"))
        await runner.start(order, _no_doubt)
        assert (tmp_path / "marker").read_text() == "ran\n"
    finally:
        runner.close()


async def test_late_first_supervisor_has_started_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves L13. The worker that met it starts the attempt again; it is not a loss."""
    met = asyncio.Event()
    begun_by_another = ProcessHandle._wait_for_other_supervisor

    async def noted(attempt: ProcessHandle) -> None:
        met.set()
        await begun_by_another(attempt)

    monkeypatch.setattr(ProcessHandle, "_wait_for_other_supervisor", noted)
    runner = ProcessRunner(StateFolder(tmp_path), "site", user=None, log_cap=1 << 20)
    identity = Identity("site", "job", 1)
    order = StartRequest(
        identity=identity, domain=runner.domain, token=1, spec={"command": ["true"]}, inputs={}, start_by=1e12
    )
    folder = runner.folder(identity)
    folder.create()
    try:
        lock = os.open(folder.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        starting = asyncio.create_task(runner.start(order, _no_doubt))
        await met.wait()
        os.close(lock)
        with pytest.raises(StartTooLate):
            await starting
    finally:
        runner.close()
