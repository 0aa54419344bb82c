"""Processes in a worker: environment, user, input, readiness checks of a lane, hand-over, caps and drains."""

import json
import os
import sqlite3
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.model import Job, Status
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.users import user_for
from holdfast.store.store import sqlite_path
from tests.support.in_process_workers import PATIENCE, InProcessWorkers, eventually
from tests.support.supervisor_harness import needs_root


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


async def test_stdin_is_the_given_text_or_empty(workers: InProcessWorkers) -> None:
    one = await workers.command("cat", spec={"stdin": "to be read"})
    two = await workers.command("cat")
    async with workers.worker():
        await workers.ended(one, Status.SUCCEEDED)
        await workers.ended(two, Status.SUCCEEDED)
    assert (await workers.log(one), await workers.log(two)) == (["to be read"], [])


async def test_a_lane_that_is_not_ready_pauses_its_job_with_the_reason(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """Proves C10."""
    flag = tmp_path / "ready"
    await workers.store.lanes.set_check(
        "db", {"command": ["sh", "-c", f"echo no {flag.name}; test -e {flag}"], "timeout": 0.5}
    )
    job = await workers.sh("echo ran", lane="db")
    second = await workers.sh("echo second", lane="db")
    async with workers.worker():
        paused = await workers.ended(job, Status.PAUSED)
        assert paused.error is not None
        assert paused.error.code == "not_ready"
        assert "lane db was not ready within 0.5 seconds" in paused.error.message
        assert "no ready" in paused.error.message
        assert paused.attempts == 0
        assert (await workers.get(second)).status is Status.QUEUED
        flag.touch()
        await workers.store.jobs.resume(job.id)
        await workers.ended(job, Status.SUCCEEDED)
        await workers.ended(second, Status.SUCCEEDED)
    assert await workers.log(job) == ["ran"]


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
