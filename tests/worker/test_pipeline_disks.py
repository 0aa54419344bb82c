"""Pipelines and their disk: no room for a snapshot or a command, and copies on btrfs."""

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest

from holdfast.model import Status
from holdfast.pipeline.snapshots import TEMPORARY, SnapshotFolders
from holdfast.runner.process_handle import ProcessHandle
from holdfast.runner.wire import Command
from tests.support.disks import MIB, disk, missing
from tests.support.in_process_workers import InProcessWorkers
from tests.support.pipelines import Pipelines, adds, task


async def test_snapshot_that_finds_no_room_fails_the_job_and_leaves_nothing(pipelines: Pipelines) -> None:
    """Proves P11."""
    workers = pipelines.workers
    workers.set(snapshots_max_bytes=1000)
    async with workers.worker():
        job = await workers.ended(
            await pipelines.submit(adds("small"), task("large", "head -c 2000 /dev/zero > big")), Status.FAILED
        )
        assert job.error is not None
        assert (job.error.code, await pipelines.kept()) == ("cache_full", ["small"])
        assert "HOLDFAST_SNAPSHOTS_MAX_BYTES is 1000" in job.error.message
        assert len(SnapshotFolders.below(workers.settings.shared).names()) == 1
        await workers.ended(await pipelines.submit(adds("small"), adds("other")), Status.SUCCEEDED)
    assert await pipelines.kept() == ["other", "small"]


@pytest.mark.skipif(missing("ext4") is not None, reason=missing("ext4") or "")
async def test_full_disk_fails_the_job_whatever_its_path_is_called(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves P6, P11: a supervisor takes 256 bytes of a text, and not half a letter."""
    with disk(tmp_path, "ext4", 8 * MIB) as small:
        workers.set(shared_dir=small.joinpath(*["ü" * 100] * 3), disk_reserve=None)
        pipelines = Pipelines(workers, tmp_path)
        async with workers.worker():
            large = task("large", f"head -c {10 * MIB} /dev/urandom > big")
            job = await workers.ended(await pipelines.submit(adds("small"), large), Status.FAILED)
        assert job.error is not None
        assert (job.error.code, await pipelines.kept()) == ("cache_full", ["small"])
        assert job.error.message.startswith("No space left on device: free disk space or remove snapshots")
        assert await pipelines.statuses(job) == ["succeeded", "succeeded"]
        folders = SnapshotFolders.below(workers.settings.shared)
        assert folders.names() == [one.folder for one in await pipelines.snapshots()]
        assert list((folders.root / TEMPORARY).iterdir()) == []


async def test_command_that_did_not_fit_on_a_full_disk_is_retried(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves P2: the job waits for room, and does not fail by it."""
    tell = ProcessHandle.send
    refused: list[str] = []

    async def no_room(self: ProcessHandle, command: Command) -> str:
        if len(refused) < 2:
            refused.append(command.verb)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return await tell(self, command)

    monkeypatch.setattr(ProcessHandle, "send", no_room)
    async with pipelines.workers.worker():
        job = await pipelines.workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    assert (refused, await pipelines.statuses(job), pipelines.ran()) == (
        ["go", "go"],
        ["succeeded"] * 2,
        ["one", "two"],
    )


@pytest.mark.skipif(missing("btrfs") is not None, reason=str(missing("btrfs")))
async def test_workspace_on_btrfs_is_copied_in_one_step_from_the_first_task_on(
    workers: InProcessWorkers, tmp_path: Path
) -> None:
    """Proves P6, P11: also a fresh one, which no snapshot was restored to; and nothing of it is left."""
    with disk(tmp_path, "btrfs", 256 * MIB) as mounted:
        workers.set(data_dir=mounted / "data", disk_reserve=None)
        pipelines = Pipelines(workers, tmp_path)
        async with workers.worker():
            job = await workers.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
            more = await workers.ended(await pipelines.submit(adds("one"), adds("three")), Status.SUCCEEDED)
        assert (await pipelines.statuses(job), await pipelines.statuses(more)) == (
            ["succeeded"] * 2,
            ["cached", "succeeded"],
        )
        assert await pipelines.content("three") == "one\nthree\n"
        shown = [subvolume("show", pipelines.folder_of(one)) for one in await pipelines.snapshots()]
        assert len(shown) == 3
        assert not [text for text in shown if re.search(r"Parent UUID:\s+-", text)], "each was made from another one"
        for snapshot in await pipelines.snapshots():
            SnapshotFolders.below(workers.settings.shared).remove(snapshot.folder)
        assert (workers.folders, SnapshotFolders.below(workers.settings.shared).names()) == ([], [])
        assert subvolume("list", mounted) == ""


def subvolume(verb: str, folder: Path) -> str:
    """What btrfs says of a folder; to show one that is no subvolume is an error."""
    return subprocess.run(["btrfs", "subvolume", verb, folder], capture_output=True, text=True, check=True).stdout
