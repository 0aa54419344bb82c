"""Removal of attempt folders: many at a time, with any content."""

import asyncio
import os
from pathlib import Path

import pytest

from holdfast.model import Status
from holdfast.runner import supervisor
from holdfast.runner.exits import ProcessExits
from holdfast.runner.removal import FolderRemover
from holdfast.worker import queue_slots
from tests.support.in_process_workers import InProcessWorkers


@pytest.mark.parametrize("built", [True, False], ids=["remover", "without-remover"])
async def test_many_folders_are_removed_together(tmp_path: Path, built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not built:
        monkeypatch.setattr(supervisor, "path", lambda: tmp_path / "missing")
    children = ProcessExits()
    removals = FolderRemover(children, tmp_path / "spare")
    folders = [tmp_path / f"-{n} of '50'\n" for n in range(50)]
    for folder in folders:
        (folder / "work" / "output").mkdir(parents=True)
        (folder / "spec").write_text("")
    await asyncio.gather(*(removals.remove(folder) for folder in folders))
    assert os.listdir(tmp_path) == []
    await removals.remove(folders[0])  # One that is gone already is no error.
    removals.close()
    children.close()


async def test_a_folder_deeper_than_a_path_can_be_long_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 20, dir_fd=fd)
        inner = os.open("d" * 20, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    children = ProcessExits()
    removals = FolderRemover(children, tmp_path / "spare")
    await removals.remove(folder)
    assert not folder.exists()
    removals.close()
    children.close()


async def test_removal_frees_its_slot_and_is_bounded(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow removal holds no slot. If many folders wait for removal, the worker claims nothing.

    Exiting waits for them.
    """
    goes_on = asyncio.Event()
    really = FolderRemover._remove

    async def slowly(self: FolderRemover, folders: list[str]) -> None:
        await goes_on.wait()
        await really(self, folders)

    monkeypatch.setattr(FolderRemover, "_remove", slowly)
    monkeypatch.setattr(queue_slots, "CLEARING", 2)
    jobs = [await workers.sh("true") for _ in range(3)]
    async with workers.worker({"default": 1}):
        for job in jobs[:2]:
            await workers.ended(job, Status.SUCCEEDED)
        # Reason: time in which it would wrongly claim the third.
        await asyncio.sleep(3 * workers.settings.poll_interval)
        assert (await workers.get(jobs[2])).status is Status.QUEUED
        assert len(workers.folders) == 2
        goes_on.set()
        await workers.ended(jobs[2], Status.SUCCEEDED)
    assert workers.folders == []
