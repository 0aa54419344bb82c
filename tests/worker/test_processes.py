"""Processes in a worker: their environment, their output, and how each end is recorded."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.model import Cause, Job, Status
from holdfast.runner.attempt_folder import AttemptFolder, write_new
from holdfast.runner.collected_outputs import CollectedOutputs
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.users import user_for
from holdfast.store.events import Events
from holdfast.store.store import sqlite_path
from tests.support.in_process_workers import PATIENCE, InProcessWorkers, eventually
from tests.support.supervisor_harness import needs_root
from tests.support.supervisor_harness import running as alive


async def test_a_process_runs_and_its_output_is_kept_apart_and_in_order(workers: InProcessWorkers) -> None:
    """The last line before the exit is there, with or without a line end. Proves R10, R2."""
    script = "for n in 1 2 3; do echo out $n; echo err $n >&2; done; printf 'no line end'"
    job = await workers.sh(script)
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert await workers.log(job) == ["out 1", "out 2", "out 3", "no line end"]
    assert await workers.log(job, "stderr") == ["err 1", "err 2", "err 3"]
    assert (ended.exit_code, ended.attempts) == (0, 1)
    assert [event.type for event in await workers.events(job)][-1] == "status"
    assert workers.folders == []


async def test_environment_is_built_from_nothing_and_has_the_identity(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R1, R25."""
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "x")
    env = {"A": "1", "HOLDFAST_JOB_ID": "forged", "HOME": "/nowhere"}
    job = await workers.sh("env; echo WORK=$(pwd); cat request.json", env=env, inputs={"rows": 3})
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    lines = await workers.log(job)
    known = dict(line.split("=", 1) for line in lines[:-1])
    assert "SECRET_OF_THE_WORKER" not in known
    assert (known["A"], known["HOME"], known["HOLDFAST_JOB_ID"]) == ("1", "/nowhere", job.id)
    assert (known["HOLDFAST_ATTEMPT"], known["HOLDFAST_LEASE_TOKEN"]) == ("1", "1")
    assert known["HOLDFAST_WORK_DIR"] == known["WORK"]
    assert known["HOLDFAST_MARK"] == f"{await workers.store.installation()}/{job.id}/1"
    assert json.loads(lines[-1]) == {"rows": 3}


async def test_event_lines_are_events_and_all_others_are_log_lines(workers: InProcessWorkers) -> None:
    """What only looks like an event, or claims to be one of ours, is a log line. Proves R11, C7."""
    lines = [
        '{"event":"progress","percent":40,"message":"so far"}',
        "plain",
        '{"event":"usage","tokens":7}',
        '{"event":"usage","tokens":"many"}',
        '{"event":"checkpoint","at":[1,2]}',
        '{"event":"status","status":"succeeded"}',
        '{"event":5}',
        '{"no":"event"}',
        '{"event":"torn',
    ]
    job = await workers.command("printf", "%s\\n", *lines)
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert await workers.log(job) == [lines[n] for n in (1, 3, 5, 6, 7, 8)]
    assert (ended.progress, ended.usage) == ({"percent": 40, "message": "so far"}, {"tokens": 7})
    assert [event.data for event in await workers.events(job, "checkpoint")] == [{"at": [1, 2]}]
    statuses = [event.data["status"] for event in await workers.events(job, "status")]
    assert statuses == ["queued", "running", "succeeded"]


async def test_log_is_truncated_at_its_cap_and_event_lines_still_pass(workers: InProcessWorkers) -> None:
    """Nothing is lost below the cap. Proves R10."""
    workers.set(log_max_bytes=10_000)
    script = 'seq 1 100000; echo \'{"event":"late"}\'; echo err >&2'
    job = await workers.sh(script)
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    log = await workers.log(job)
    assert log[:-1] == [str(n) for n in range(1, len(log))]
    assert "over 10000 bytes" in log[-1]
    kept = sum(len(line) + 1 for line in log[:-1])
    assert 9_900 < kept <= 10_000
    assert len(await workers.events(job, "late")) == 1


async def test_output_that_is_no_text_and_lines_without_an_end_do_no_harm(workers: InProcessWorkers) -> None:
    """Proves R10."""
    job = await workers.sh(
        "printf 'a\\377\\000b\\n'; head -c 200000 /dev/zero | tr '\\0' 'ä'; printf 'ü%.0s' $(seq 40000)"
    )
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    log = await workers.log(job)
    assert log[0] == "a\ufffd\0b"
    whole = "".join(log[1:])
    assert whole.count("ü") == 40_000
    assert len(max(log, key=len).encode()) <= 3 * 65_536


async def test_stdin_is_the_given_text_or_empty(workers: InProcessWorkers) -> None:
    one = await workers.command("cat", spec={"stdin": "to be read"})
    two = await workers.command("cat")
    async with workers.worker():
        await workers.ended(one, Status.SUCCEEDED)
        await workers.ended(two, Status.SUCCEEDED)
    assert (await workers.log(one), await workers.log(two)) == (["to be read"], [])


async def test_a_command_that_cannot_run_fails_at_once_and_is_not_retried(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """The message names it, nothing is left behind. Proves R17."""
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


async def test_a_lane_that_is_not_ready_pauses_its_job_with_the_reason(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """Proves C10."""
    flag = tmp_path / "ready"
    await workers.store.lanes.set_check(
        "db", {"command": ["sh", "-c", f"echo no {flag.name}; test -e {flag}"], "timeout": 0.5}
    )
    job = await workers.sh("echo ran", lane="db")
    behind = await workers.sh("echo second", lane="db")
    async with workers.worker():
        paused = await workers.ended(job, Status.PAUSED)
        assert paused.error is not None
        assert paused.error.code == "not_ready"
        assert "lane db was not ready within 0.5 seconds" in paused.error.message
        assert "no ready" in paused.error.message
        assert paused.attempts == 0
        assert (await workers.get(behind)).status is Status.QUEUED
        flag.touch()
        await workers.store.jobs.resume(job.id)
        await workers.ended(job, Status.SUCCEEDED)
        await workers.ended(behind, Status.SUCCEEDED)
    assert await workers.log(job) == ["ran"]


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


@needs_root
async def test_as_root_a_process_runs_as_a_user_of_its_own(workers: InProcessWorkers, tmp_path: Path) -> None:
    """It cannot read what is the worker's, and its own folder is its own. Proves R25."""
    for folder in [tmp_path, *tmp_path.parents]:
        if folder != Path("/") and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    secret = tmp_path / "admin.token"
    secret.write_text("secret")
    secret.chmod(0o600)
    workers.set(process_user="65532")
    job = await workers.sh(f"id -u; id -G; cat {secret}; cat ../spec; touch mine; stat -c %u mine request.json")
    named = await workers.command("id", "-un", spec={"user": "nobody"})
    nobody = await workers.command("id", spec={"user": "no-such-user"})
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
        await workers.ended(named, Status.SUCCEEDED)
        unknown = await workers.ended(nobody, Status.FAILED)
    assert await workers.log(job) == ["65532", "65532", "65532", "65532"]
    assert [line.rpartition(": ")[2] for line in await workers.log(job, "stderr")] == ["Permission denied"] * 2
    assert await workers.log(named) == ["nobody"]
    assert unknown.error is not None
    assert "no-such-user" in unknown.error.message


@needs_root
def test_a_state_folder_that_the_user_cannot_reach_is_refused(tmp_path: Path) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=r"cannot get through .*HOLDFAST_PROCESS_USER=root"):
        user_for("65532", shut)
    with pytest.raises(ConfigError, match="no user nosuchuser"):
        user_for("nosuchuser", tmp_path)
    assert user_for("root", shut) is None


async def test_a_chatty_process_can_be_cancelled_while_the_database_is_slow(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes faster than its output is shipped. Proves C1."""
    append = Events.append

    async def slow(*arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(0.05)  # Reason: this is the slow database.
        return await append(*arguments, **named)

    monkeypatch.setattr(Events, "append", slow)
    job = await workers.sh("while :; do echo chatter; done", stop_grace=0.2)
    async with workers.worker():
        await workers.wait_for_log(job, "chatter")
        await workers.store.jobs.cancel(job.id)
        await workers.ended(job, Status.CANCELLED)


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_worker_that_cannot_hand_over_keeps_its_lock_file(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L19. The database takes no hand-over: the host's next worker knows of it, and waits for no lease."""
    monkeypatch.setattr("holdfast.worker.worker.DRAIN_SECONDS", 0.1)
    monkeypatch.setattr("holdfast.store.sqlite_connection.BUSY_SECONDS", 1.0)
    workers.set(drain_grace=0.1)
    job = await workers.sh("echo up; while [ ! -e go ]; do sleep 0.05; done; echo gone")
    locks = StateFolder(workers.settings.state).locks(await workers.store.installation())
    async with workers.worker() as worker:
        await workers.wait_for_log(job, "up")
        (folder,) = workers.settings.state.glob(f"attempts/*/{job.id}.1")
        blocker = sqlite3.connect(sqlite_path(workers.settings.database_url or ""), isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
    blocker.execute("ROLLBACK")
    blocker.close()
    assert locks.others("another") == [worker.id]
    workers.set(lease_ttl=600.0)
    async with workers.worker():
        await eventually(lambda: _adopted(workers, job), "it is adopted at once")
        (folder / "work" / "go").touch()
        await workers.ended(job, Status.SUCCEEDED)
    assert await workers.log(job) == ["up", "gone"]


async def _adopted(workers: InProcessWorkers, job: Job) -> bool:
    return [event.data["lease"] for event in await workers.events(job, "lease")][-1:] == ["adopted"]


@pytest.mark.parametrize("code", [120, 121, 122, 123, 124, 125])
async def test_exit_codes_that_a_supervisor_uses_itself_are_the_commands_own(
    workers: InProcessWorkers, code: int
) -> None:
    job = await workers.sh(f"exit {code}")
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert (ended.exit_code, ended.attempts) == (code, 1)


async def test_full_host_fails_no_job(workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a better moment, and no attempt is counted. Proves R5 for a host."""
    full = [errno.ENOSPC, errno.EMFILE]

    def exhausted(path: str | Path, data: bytes) -> None:
        if full:
            raise OSError(full.pop(), "no room")
        write_new(path, data)

    monkeypatch.setattr("holdfast.runner.process.write_new", exhausted)
    monkeypatch.setattr("holdfast.runner.process.EXHAUSTED_SECONDS", 0.2)
    monkeypatch.setattr("holdfast.worker.executor.AWAY_SECONDS", 0.1)
    job = await workers.sh("echo ran")
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, await workers.log(job), full) == (1, ["ran"], [])


async def test_outputs_that_cannot_be_stored_yet_wait_and_nothing_is_lost(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = CollectedOutputs.publish
    away = [errno.ESTALE, errno.ENOSPC]

    def refused(self: CollectedOutputs) -> None:
        if away:
            raise OSError(away.pop(), "away")
        publish(self)

    monkeypatch.setattr(CollectedOutputs, "publish", refused)
    job = await workers.sh("echo kept > output/file")
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    (attempt,) = await workers.store.attempts.list(job.id)
    kept = FolderArtifacts(workers.settings.shared).list(job.id, attempt.attempt, attempt.token)
    assert ([artifact.path for artifact in kept], ended.attempts, away) == (["file"], 1, [])


async def test_job_whose_outputs_find_no_room_can_be_cancelled(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves C1. It waits for room until it is cancelled."""
    tried = asyncio.Event()
    loop = asyncio.get_running_loop()

    def refused(self: CollectedOutputs) -> None:
        loop.call_soon_threadsafe(tried.set)
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(CollectedOutputs, "publish", refused)
    job = await workers.sh("echo kept > output/file")
    async with workers.worker():
        await tried.wait()
        await workers.store.jobs.cancel(job.id)
        ended = await workers.ended(job, Status.CANCELLED)
    assert (ended.exit_code, ended.attempts) == (0, 1)


async def test_a_stop_after_that_no_heartbeat_can_renew_is_refused(workers: InProcessWorkers) -> None:
    job = await workers.sh("sleep 60", stop_after=1.5, max_attempts=5)
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert ended.error.code == "contract_violation"
    assert "at least 2 s" in ended.error.message


async def test_a_readiness_check_that_hangs_is_bounded_by_its_time(workers: InProcessWorkers) -> None:
    """Also when what it started holds its output open. Proves C10."""
    await workers.store.lanes.set_check("db", {"command": ["sh", "-c", "sleep 600; true"], "timeout": 0.5})
    job = await workers.sh("echo never", lane="db")
    async with workers.worker():
        paused = await workers.ended(job, Status.PAUSED)
        assert paused.error is not None
        assert paused.error.code == "not_ready"
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _says(pid, b"sleep\0600\0")]


def _says(pid: str, command: bytes) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == command
    except OSError:
        return False


async def test_capped_queue_continues_as_soon_as_a_job_ends(workers: InProcessWorkers) -> None:
    """Without waiting for a poll, which would come later than this test waits. Proves J10."""
    workers.set(poll_interval=2 * PATIENCE)
    await workers.store.queues.limit("narrow", cap=1)
    jobs = [await workers.sh("true", queue="narrow") for _ in range(5)]
    async with workers.worker({"narrow": 4}):
        for job in jobs:
            await workers.ended(job, Status.SUCCEEDED)


async def test_drain_does_not_count_as_a_signal(workers: InProcessWorkers) -> None:
    """One signal after a drain by the database still gives functions their grace. Proves C9."""
    async with workers.worker() as worker:
        worker.drain()
        worker.drain()
        worker.signalled()


@needs_root
async def test_log_reports_output_lost_on_a_full_disk(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves R10. If no frame follows the gap, the log still says how much is missing."""
    with small_disk(tmp_path / "disk") as disk:
        workers.set(state_dir=disk, disk_reserve=None)
        async with workers.worker():
            job = await workers.sh("yes line | head -c 3000000; echo last line >&2")
            await workers.ended(job, Status.SUCCEEDED)
        logs = [event.data for event in await workers.events(job, "log") if event.data["stream"] == "stdout"]
        kept = sum(len(line) + 1 for data in logs if "missing" not in data for line in data["lines"])
        missing = sum(data.get("missing", 0) for data in logs)
        assert missing > 1_000_000
        assert abs(kept + missing - 3_000_000) < len("line\n")


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)
