"""Workers killed while the disk is full: nothing runs twice, and what never started can be cancelled."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.model import Status
from tests.support.crashing_worker import Hook
from tests.support.disks import FullDisk, tmpfs
from tests.support.in_process_workers import eventually
from tests.support.supervisor_harness import needs_root
from tests.support.worker_processes import WorkerProcesses


def entries(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


async def with_state(processes: WorkerProcesses, environment: Mapping[str, str]) -> None:
    """Let a worker make the state folder, while there is space, and stay. No spare folder is left for a later start."""
    processes.start({"other": 1}, adopts=False, environment=environment)
    await processes.ended(await processes.sh("true", queue="other"), Status.SUCCEEDED)
    state = Path(environment["HOLDFAST_STATE_DIR"])

    async def kept() -> list[Path]:
        return entries(state, "spare-folders/*/[!.]*")

    for folder in await eventually(kept, "the folder of the first attempt is kept for a later one"):
        shutil.rmtree(folder)
    assert entries(state, "attempts/*/*") == []


@needs_root
async def test_worker_killed_at_any_step_on_a_full_disk_runs_nothing_twice(
    processes: WorkerProcesses, tmp_path: Path
) -> None:
    """kill -9 before the start, after it found no space, and before and after the job was requeued."""
    with tmpfs(tmp_path / "disk", "size=2m") as place:
        disk = FullDisk(place, "pages")
        environment = {"HOLDFAST_STATE_DIR": str(place / "state"), "HOLDFAST_DISK_RESERVE": "none"}
        await with_state(processes, environment)
        steps = ("prepared", "no space", "classified", "finished", "removed")
        for free in (0, 8):
            for step in steps:
                disk.leave(free)
                job = await processes.sh(f"echo ran >> {tmp_path / 'ran'}", queue=step)
                victim = processes.start({step: 1}, Hook(step=step, do="kill", job=job.id), environment=environment)
                assert await victim.dead() == -9, step
                disk.clear()
                survivor = processes.start({step: 1}, environment=environment)
                ended = await processes.ended(job, Status.SUCCEEDED)
                assert ended.attempts == 1, step
                survivor.signal(15)
                await survivor.dead()
        assert (tmp_path / "ran").read_text().split() == ["ran"] * 2 * len(steps)


@needs_root
@pytest.mark.parametrize("step", ["prepared", "no space"])
async def test_orphan_that_never_started_can_be_cancelled_on_a_full_disk(
    processes: WorkerProcesses, tmp_path: Path, step: str
) -> None:
    """Its start marker needs no new block: there is a reserved one in its folder or, if that is missing, a spare."""
    with tmpfs(tmp_path / "disk", "size=2m") as place:
        disk = FullDisk(place, "pages")
        environment = {"HOLDFAST_STATE_DIR": str(place / "state"), "HOLDFAST_DISK_RESERVE": "none"}
        await with_state(processes, environment)
        disk.leave(8)
        job = await processes.sh("echo ran")
        victim = processes.start({"default": 1}, Hook(step=step, do="kill"), environment=environment)
        assert await victim.dead() == -9
        made = [path for path in (place / "state").glob("attempts/*/*") if (path / "spare.0").exists()]
        assert len(made) == (step == "no space")
        disk.leave(0)
        await processes.store.jobs.cancel(job.id)
        processes.start({"default": 1}, environment=environment)
        assert (await processes.ended(job, Status.CANCELLED)).attempts == 0
