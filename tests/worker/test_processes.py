"""Processes in a worker: what they get, what becomes of their output, and how each end is recorded."""

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
from holdfast.runner.artifacts import Artifacts, Gathered
from holdfast.runner.attempt_folder import AttemptFolder, write_new
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.users import user_for
from holdfast.store.events import Events
from holdfast.store.store import sqlite_path
from tests.support.in_process_worker import Rig, eventually
from tests.support.supervisor_harness import needs_root
from tests.support.supervisor_harness import running as alive


async def test_a_process_runs_and_its_output_is_kept_apart_and_in_order(rig: Rig) -> None:
    """The last line before the exit is there, with or without a line end. Proves R10, R2."""
    script = "for n in 1 2 3; do echo out $n; echo err $n >&2; done; printf 'no line end'"
    job = await rig.sh(script)
    async with rig.worker():
        ended = await rig.ended(job, Status.SUCCEEDED)
    assert await rig.log(job) == ["out 1", "out 2", "out 3", "no line end"]
    assert await rig.log(job, "stderr") == ["err 1", "err 2", "err 3"]
    assert (ended.exit_code, ended.attempts) == (0, 1)
    assert [event.type for event in await rig.events(job)][-1] == "status"
    assert rig.folders == []


async def test_the_environment_is_built_from_nothing_and_says_who_it_is(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R1, R25."""
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "x")
    env = {"A": "1", "HOLDFAST_JOB_ID": "forged", "HOME": "/nowhere"}
    job = await rig.sh("env; echo WORK=$(pwd); cat request.json", env=env, inputs={"rows": 3})
    async with rig.worker():
        await rig.ended(job, Status.SUCCEEDED)
    lines = await rig.log(job)
    known = dict(line.split("=", 1) for line in lines[:-1])
    assert "SECRET_OF_THE_WORKER" not in known
    assert (known["A"], known["HOME"], known["HOLDFAST_JOB_ID"]) == ("1", "/nowhere", job.id)
    assert (known["HOLDFAST_ATTEMPT"], known["HOLDFAST_LEASE_TOKEN"]) == ("1", "1")
    assert known["HOLDFAST_WORK_DIR"] == known["WORK"]
    assert known["HOLDFAST_MARK"] == f"{await rig.store.installation()}/{job.id}/1"
    assert json.loads(lines[-1]) == {"rows": 3}


async def test_event_lines_are_events_and_all_others_are_log_lines(rig: Rig) -> None:
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
    job = await rig.command("printf", "%s\\n", *lines)
    async with rig.worker():
        ended = await rig.ended(job, Status.SUCCEEDED)
    assert await rig.log(job) == [lines[n] for n in (1, 3, 5, 6, 7, 8)]
    assert (ended.progress, ended.usage) == ({"percent": 40, "message": "so far"}, {"tokens": 7})
    assert [event.data for event in await rig.events(job, "checkpoint")] == [{"at": [1, 2]}]
    statuses = [event.data["status"] for event in await rig.events(job, "status")]
    assert statuses == ["queued", "running", "succeeded"]


async def test_a_log_is_cut_at_its_cap_with_a_mark_and_event_lines_still_pass(rig: Rig) -> None:
    """Nothing is lost below the cap. Proves R10."""
    rig.set(log_max_bytes=10_000)
    script = 'seq 1 100000; echo \'{"event":"late"}\'; echo err >&2'
    job = await rig.sh(script)
    async with rig.worker():
        await rig.ended(job, Status.SUCCEEDED)
    log = await rig.log(job)
    assert log[:-1] == [str(n) for n in range(1, len(log))]
    assert "over 10000 bytes" in log[-1]
    kept = sum(len(line) + 1 for line in log[:-1])
    assert 9_900 < kept <= 10_000
    assert len(await rig.events(job, "late")) == 1


async def test_output_that_is_no_text_and_lines_without_an_end_do_no_harm(rig: Rig) -> None:
    """Proves R10."""
    job = await rig.sh("printf 'a\\377\\000b\\n'; head -c 200000 /dev/zero | tr '\\0' 'ä'; printf 'ü%.0s' $(seq 40000)")
    async with rig.worker():
        await rig.ended(job, Status.SUCCEEDED)
    log = await rig.log(job)
    assert log[0] == "a\ufffd\0b"
    whole = "".join(log[1:])
    assert whole.count("ü") == 40_000
    assert len(max(log, key=len).encode()) <= 3 * 65_536


async def test_stdin_is_what_the_job_says_or_nothing(rig: Rig) -> None:
    one = await rig.command("cat", spec={"stdin": "to be read"})
    two = await rig.command("cat")
    async with rig.worker():
        await rig.ended(one, Status.SUCCEEDED)
        await rig.ended(two, Status.SUCCEEDED)
    assert (await rig.log(one), await rig.log(two)) == (["to be read"], [])


async def test_a_command_that_cannot_run_fails_at_once_and_is_not_retried(rig: Rig, tmp_path: Path) -> None:
    """The message names it, nothing is left behind. Proves R17."""
    script = tmp_path / "script"
    script.write_text("echo hi")
    jobs = {
        "no-such-command": await rig.command("no-such-command", max_attempts=5),
        str(script): await rig.command(str(script), max_attempts=5),
        "/": await rig.command("/", max_attempts=5),
    }
    async with rig.worker():
        for name, job in jobs.items():
            ended = await rig.ended(job, Status.FAILED)
            assert ended.error is not None
            assert ended.error.code == "command_missing"
            assert name in ended.error.message
            assert ended.attempts == 1
    assert rig.folders == []


async def test_every_cause_of_an_end_is_in_the_ledger(rig: Rig) -> None:
    """Proves R20, R8, R9."""
    quick: Any = {"stop_grace": 0.2}
    jobs = {
        Cause.EXIT: await rig.sh("exit 3"),
        Cause.TIMED_OUT: await rig.sh("echo partial; sleep 60", timeout=0.3, **quick),
        Cause.IDLE_TIMEOUT: await rig.sh("sleep 60", idle_timeout=0.3, **quick),
        Cause.START_FAILED: await rig.command("no-such-command"),
        Cause.CANCELLED: await rig.sh("echo up; sleep 60", **quick),
        Cause.INTERRUPTED: await rig.sh("echo up; sleep 60", **quick),
        Cause.LOST: await rig.sh("echo up; sleep 60", **quick),
    }
    by_signal = await rig.sh("kill -SEGV $$")
    async with rig.worker():
        for cause in (Cause.CANCELLED, Cause.INTERRUPTED, Cause.LOST):
            await rig.says(jobs[cause], "up")
        await rig.store.jobs.cancel(jobs[Cause.CANCELLED].id)
        await rig.store.jobs.interrupt(jobs[Cause.INTERRUPTED].id)
        (folder,) = [folder for folder in rig.folders if jobs[Cause.LOST].id in folder.name]
        started = AttemptFolder(folder).started()
        assert started is not None
        os.kill(started.supervisor_pid, signal.SIGKILL)
        for job in (*jobs.values(), by_signal):
            await rig.ended(job)
    ends = {}
    for cause, job in jobs.items():
        (attempt,) = await rig.store.attempts.list(job.id)
        assert attempt.cause is cause
        ends[cause] = (attempt.exit_code, (await rig.get(job)).status, attempt.error and attempt.error.code)
    assert ends == {
        Cause.EXIT: (3, Status.FAILED, "exit_nonzero"),
        Cause.TIMED_OUT: (124, Status.TIMED_OUT, "timed_out"),
        Cause.IDLE_TIMEOUT: (124, Status.TIMED_OUT, "idle_timeout"),
        Cause.START_FAILED: (None, Status.FAILED, "command_missing"),
        Cause.CANCELLED: (None, Status.CANCELLED, "cancelled"),
        Cause.INTERRUPTED: (None, Status.PAUSED, "interrupted"),
        Cause.LOST: (None, Status.FAILED, "lost"),
    }
    (attempt,) = await rig.store.attempts.list(by_signal.id)
    assert (attempt.cause, attempt.signal, attempt.exit_code) == (Cause.EXIT, signal.SIGSEGV, None)
    assert await rig.log(jobs[Cause.TIMED_OUT]) == ["partial"]


async def test_a_job_that_fails_is_run_again_in_a_folder_of_its_own(rig: Rig) -> None:
    """Attempt 2 knows nothing of attempt 1. Proves R1, L13."""
    script = "echo attempt $HOLDFAST_ATTEMPT; ls; touch was-here; [ $HOLDFAST_ATTEMPT = 2 ]"
    job = await rig.sh(script, max_attempts=3, retry={"base": 0.01, "cap": 0.01})
    async with rig.worker():
        ended = await rig.ended(job, Status.SUCCEEDED)
    assert await rig.log(job) == ["attempt 1", "output", "request.json", "attempt 2", "output", "request.json"]
    assert ended.attempts == 2


async def test_a_stop_request_climbs_the_ladder_and_each_rung_is_told(rig: Rig) -> None:
    """A child that ignores TERM is killed. Proves C4, R25: what left the group is gone too."""
    script = "trap '' TERM; setsid sh -c 'trap \"\" TERM; echo pid=$$; sleep 600' & echo up; wait; sleep 600"
    job = await rig.sh(script, stop_grace=0.3)
    async with rig.worker():
        await rig.says(job, "up")

        async def pid() -> int | None:
            found = [line for line in await rig.log(job) if line.startswith("pid=")]
            return int(found[0].removeprefix("pid=")) if found else None

        grandchild = await eventually(pid, "the grandchild says who it is")
        await rig.store.jobs.cancel(job.id, by="someone")
        await rig.ended(job, Status.CANCELLED)
    told = [event.data["cancel"] for event in await rig.events(job, "cancel")]
    assert told == ["requested", "signalled", "killed", "dead"]
    assert not alive(grandchild)


async def test_over_its_budget_a_process_is_stopped_and_not_retried(rig: Rig) -> None:
    """Proves C6, C7."""
    script = 'while :; do echo \'{"event":"usage","tokens":30}\'; sleep 0.05; done'
    job = await rig.sh(script, budget={"tokens": 100}, max_attempts=4, stop_grace=1)
    async with rig.worker():
        ended = await rig.ended(job, Status.FAILED)
    assert ended.error is not None
    assert (ended.error.code, ended.attempts) == ("budget_exceeded", 1)
    assert "of 100" in ended.error.message
    assert ended.usage["tokens"] > 100


async def test_a_lane_that_is_not_ready_pauses_its_job_with_the_reason(rig: Rig, tmp_path: Path) -> None:
    """Proves C10."""
    flag = tmp_path / "ready"
    await rig.store.lanes.set_check(
        "db", {"command": ["sh", "-c", f"echo no {flag.name}; test -e {flag}"], "timeout": 0.5}
    )
    job = await rig.sh("echo ran", lane="db")
    behind = await rig.sh("echo second", lane="db")
    async with rig.worker():
        paused = await rig.ended(job, Status.PAUSED)
        assert paused.error is not None
        assert paused.error.code == "not_ready"
        assert "lane db was not ready within 0.5 seconds" in paused.error.message
        assert "no ready" in paused.error.message
        assert paused.attempts == 0
        assert (await rig.get(behind)).status is Status.QUEUED
        flag.touch()
        await rig.store.jobs.resume(job.id)
        await rig.ended(job, Status.SUCCEEDED)
        await rig.ended(behind, Status.SUCCEEDED)
    assert await rig.log(job) == ["ran"]


async def test_a_folder_that_cannot_be_made_fails_the_start_with_the_reason(rig: Rig) -> None:
    """Proves R12, R17: nothing half made is left."""
    job = await rig.sh("echo hi")
    async with rig.worker() as worker:
        root = rig.settings.state / "attempts" / await rig.store.installation()
        root.rmdir()
        root.write_text("in the way")
        bad = await rig.sh("echo hi")
        ended = await rig.ended(bad, Status.FAILED)
        assert worker.id
        root.unlink()
        root.mkdir()
    assert ended.error is not None
    assert ended.error.code == "start_failed"
    assert "cannot prepare the attempt's folder" in ended.error.message
    assert (await rig.get(job)).status in (Status.SUCCEEDED, Status.FAILED)


@needs_root
async def test_as_root_a_process_runs_as_a_user_of_its_own(rig: Rig, tmp_path: Path) -> None:
    """It cannot read what is the worker's, and its own folder is its own. Proves R25."""
    for folder in [tmp_path, *tmp_path.parents]:
        if folder != Path("/") and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    secret = tmp_path / "admin.token"
    secret.write_text("secret")
    secret.chmod(0o600)
    rig.set(process_user="65532")
    job = await rig.sh(f"id -u; id -G; cat {secret}; cat ../spec; touch mine; stat -c %u mine request.json")
    named = await rig.command("id", "-un", spec={"user": "nobody"})
    nobody = await rig.command("id", spec={"user": "no-such-user"})
    async with rig.worker():
        await rig.ended(job, Status.SUCCEEDED)
        await rig.ended(named, Status.SUCCEEDED)
        unknown = await rig.ended(nobody, Status.FAILED)
    assert await rig.log(job) == ["65532", "65532", "65532", "65532"]
    assert [line.rpartition(": ")[2] for line in await rig.log(job, "stderr")] == ["Permission denied"] * 2
    assert await rig.log(named) == ["nobody"]
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
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes faster than its output is shipped. Proves C1."""
    append = Events.append

    async def slow(*arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(0.05)
        return await append(*arguments, **named)

    monkeypatch.setattr(Events, "append", slow)
    job = await rig.sh("while :; do echo chatter; done", stop_grace=0.2)
    async with rig.worker():
        await rig.says(job, "chatter")
        await rig.store.jobs.cancel(job.id)
        await rig.ended(job, Status.CANCELLED)


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_worker_that_has_to_give_up_leaving_says_that_it_leaves_something(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L19. The database takes no hand-over: the host's next worker knows of it, and waits for no lease."""
    monkeypatch.setattr("holdfast.worker.worker.LEAVE_SECONDS", 0.1)
    monkeypatch.setattr("holdfast.store.sqlite.BUSY_SECONDS", 1.0)
    rig.set(drain_grace=0.1)
    job = await rig.sh("echo up; while [ ! -e go ]; do sleep 0.05; done; echo gone")
    locks = StateFolder(rig.settings.state).locks(await rig.store.installation())
    async with rig.worker() as worker:
        await rig.says(job, "up")
        (folder,) = rig.settings.state.glob(f"attempts/*/{job.id}.1")
        blocker = sqlite3.connect(sqlite_path(rig.settings.database_url or ""), isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
    blocker.execute("ROLLBACK")
    blocker.close()
    assert locks.others("another") == [worker.id]
    rig.set(lease_ttl=600.0)
    async with rig.worker():
        await eventually(lambda: _adopted(rig, job), "it is adopted at once")
        (folder / "work" / "go").touch()
        await rig.ended(job, Status.SUCCEEDED)
    assert await rig.log(job) == ["up", "gone"]


async def _adopted(rig: Rig, job: Job) -> bool:
    return [event.data["lease"] for event in await rig.events(job, "lease")][-1:] == ["adopted"]


@pytest.mark.parametrize("code", [120, 121, 122, 123, 124, 125])
async def test_exit_codes_that_a_supervisor_uses_itself_are_the_commands_own(rig: Rig, code: int) -> None:
    job = await rig.sh(f"exit {code}")
    async with rig.worker():
        ended = await rig.ended(job, Status.FAILED)
    assert (ended.exit_code, ended.attempts) == (code, 1)


async def test_a_host_without_room_fails_no_job(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a better moment, and no attempt is counted. Proves R5 for a host."""
    full = [errno.ENOSPC, errno.EMFILE]

    def exhausted(path: str | Path, data: bytes) -> None:
        if full:
            raise OSError(full.pop(), "no room")
        write_new(path, data)

    monkeypatch.setattr("holdfast.runner.process.write_new", exhausted)
    monkeypatch.setattr("holdfast.runner.process.EXHAUSTED_SECONDS", 0.2)
    monkeypatch.setattr("holdfast.worker.executor.AWAY_SECONDS", 0.1)
    job = await rig.sh("echo ran")
    async with rig.worker():
        ended = await rig.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, await rig.log(job), full) == (1, ["ran"], [])


async def test_outputs_that_cannot_be_stored_yet_wait_and_nothing_is_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Gathered.publish
    away = [errno.ESTALE, errno.ENOSPC]

    def refused(self: Gathered) -> None:
        if away:
            raise OSError(away.pop(), "away")
        publish(self)

    monkeypatch.setattr(Gathered, "publish", refused)
    job = await rig.sh("echo kept > output/file")
    async with rig.worker():
        ended = await rig.ended(job, Status.SUCCEEDED)
    (attempt,) = await rig.store.attempts.list(job.id)
    kept = Artifacts(rig.settings.shared).list(job.id, attempt.attempt, attempt.token)
    assert ([artifact.path for artifact in kept], ended.attempts, away) == (["file"], 1, [])


async def test_job_whose_outputs_find_no_room_can_be_cancelled(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves C1. It waits for room as long as nobody wants it to end."""
    tried = asyncio.Event()
    loop = asyncio.get_running_loop()

    def refused(self: Gathered) -> None:
        loop.call_soon_threadsafe(tried.set)
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(Gathered, "publish", refused)
    job = await rig.sh("echo kept > output/file")
    async with rig.worker():
        await tried.wait()
        await rig.store.jobs.cancel(job.id)
        ended = await rig.ended(job, Status.CANCELLED)
    assert (ended.exit_code, ended.attempts) == (0, 1)


async def test_a_stop_after_that_no_heartbeat_can_renew_is_refused(rig: Rig) -> None:
    job = await rig.sh("sleep 60", stop_after=1.5, max_attempts=5)
    async with rig.worker():
        ended = await rig.ended(job, Status.FAILED)
    assert ended.error is not None
    assert ended.error.code == "contract_violation"
    assert "at least 2 s" in ended.error.message


async def test_a_readiness_check_that_hangs_is_bounded_by_its_time(rig: Rig) -> None:
    """Also when what it started holds its output open. Proves C10."""
    await rig.store.lanes.set_check("db", {"command": ["sh", "-c", "sleep 600; true"], "timeout": 0.5})
    job = await rig.sh("echo never", lane="db")
    async with rig.worker():
        paused = await rig.ended(job, Status.PAUSED)
        assert paused.error is not None
        assert paused.error.code == "not_ready"
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _says(pid, b"sleep\0600\0")]


def _says(pid: str, command: bytes) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == command
    except OSError:
        return False


async def test_a_capped_queue_goes_on_as_soon_as_a_job_ends(rig: Rig) -> None:
    """Without waiting for a poll: this one would take half a minute each. Proves J10."""
    rig.set(poll_interval=30.0)
    await rig.store.queues.limit("narrow", cap=1)
    jobs = [await rig.sh("true", queue="narrow") for _ in range(5)]
    async with rig.worker({"narrow": 4}):
        for job in jobs:
            await rig.ended(job, Status.SUCCEEDED)


async def test_a_drain_is_no_signal(rig: Rig) -> None:
    """One signal after a drain by the database still gives functions their grace. Proves C9."""
    async with rig.worker() as worker:
        worker.leave()
        worker.leave()
        worker.signalled()


@needs_root
async def test_output_that_a_full_disk_lost_to_the_end_is_told(rig: Rig, tmp_path: Path) -> None:
    """Proves R10. Where no frame stands behind the gap, the log still says how much is missing."""
    with small_disk(tmp_path / "disk") as disk:
        rig.set(state_dir=disk, disk_reserve=None)
        async with rig.worker():
            job = await rig.sh("yes line | head -c 3000000; echo last words >&2")
            await rig.ended(job, Status.SUCCEEDED)
        logs = [event.data for event in await rig.events(job, "log") if event.data["stream"] == "stdout"]
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
