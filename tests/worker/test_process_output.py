"""The output of processes in a worker: logs in order, event lines, caps, outputs that find no room."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Status
from holdfast.runner.collected_outputs import CollectedOutputs
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.store.events import Events
from tests.support.disks import tmpfs
from tests.support.in_process_workers import InProcessWorkers
from tests.support.supervisor_harness import needs_root


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


@needs_root
async def test_log_reports_output_lost_on_a_full_disk(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves R10. If no frame follows the gap, the log still says how much is missing."""
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        workers.set(state_dir=disk, disk_reserve=None)
        async with workers.worker():
            job = await workers.sh("yes line | head -c 3000000; echo last line >&2")
            await workers.ended(job, Status.SUCCEEDED)
        logs = [event.data for event in await workers.events(job, "log") if event.data["stream"] == "stdout"]
        kept = sum(len(line) + 1 for data in logs if "missing" not in data for line in data["lines"])
        missing = sum(data.get("missing", 0) for data in logs)
        assert missing > 1_000_000
        assert abs(kept + missing - 3_000_000) < len("line\n")
