"""Pipelines whose worker lacks a permission: they fail with the reason, and affect no other job."""

import os
from pathlib import Path

import pytest

from holdfast.model import Job, Status
from holdfast.pipeline.snapshots import SnapshotFolders
from tests.support.pipelines import Pipelines, adds, task
from tests.support.supervisor_harness import needs_root
from tests.support.users import MEEK
from tests.support.worker_processes import WorkerProcesses

pytestmark = needs_root


@pytest.fixture
def pipelines(processes: WorkerProcesses, tmp_path: Path) -> Pipelines:
    return Pipelines(processes, tmp_path)


async def fails(processes: WorkerProcesses, job: Job) -> tuple[str, str, int]:
    """The code and the words that a job fails with, and how often it changed hands."""
    ended = await processes.ended(job, Status.FAILED)
    assert ended.error is not None
    return ended.error.code, ended.error.message, len(await processes.events(job, "lease"))


@pytest.mark.parametrize("trouble", ["shut", "not mounted"])
async def test_snapshot_that_cannot_be_read_here_stays_for_others(
    processes: WorkerProcesses, pipelines: Pipelines, trouble: str
) -> None:
    """Proves P4, P6: it is not taken for a damaged one."""
    processes.start({"default": 1}, through=MEEK)
    await processes.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    root = processes.settings.shared / "snapshots"
    if trouble == "shut":
        root.chmod(0)
        reason = "Permission denied, be the owner of its files, or root"
    else:
        root.rename(root.with_name("elsewhere"))
        reason = "No such file or directory, is HOLDFAST_SHARED_DIR mounted here?"
    known, more = await pipelines.submit(adds("one"), adds("two")), await pipelines.submit(adds("one"), adds("three"))
    for job in (known, more):
        code, message, hands = await fails(processes, job)
        assert (code, reason in message, str(root) in message, hands) == ("snapshot_failed", True, True, 0)
    if trouble == "shut":
        root.chmod(0o755)
    else:
        os.rename(root.with_name("elsewhere"), root)
    assert await pipelines.kept() == ["one", "two"]
    again = await processes.ended(await pipelines.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    assert (await pipelines.statuses(again), pipelines.ran()) == (["cached", "cached"], ["one", "two"])


@pytest.mark.parametrize("left", ["mkdir shut; chmod 0 shut", "touch shut; chmod 0 shut"], ids=["folder", "file"])
async def test_workspace_that_cannot_be_copied_fails_the_job_at_once(
    processes: WorkerProcesses, pipelines: Pipelines, left: str
) -> None:
    """Proves P6, P7: with the path and the reason, and without a second owner."""
    processes.start({"default": 1}, through=MEEK)
    code, message, hands = await fails(processes, await pipelines.submit(adds("one"), task("two", left)))
    assert (code, hands, await pipelines.kept()) == ("snapshot_failed", 0, ["one"])
    assert "Permission denied, the worker must be able to read what tasks leave" in message
    assert "shut" in message.rpartition("(")[2]
    assert len(SnapshotFolders.below(processes.settings.shared).names()) == 1


async def test_snapshots_that_may_not_be_written_fail_the_job_at_once(
    processes: WorkerProcesses, pipelines: Pipelines
) -> None:
    """Proves P6."""
    root = processes.settings.shared / "snapshots"
    root.mkdir(mode=0o500)
    processes.start({"default": 1}, through=MEEK)
    code, message, hands = await fails(processes, await pipelines.submit(adds("one")))
    assert (code, hands, await pipelines.kept()) == ("snapshot_failed", 0, [])
    assert "Permission denied" in message
    assert "to write to HOLDFAST_SHARED_DIR" in message


async def test_source_that_may_not_be_read_fails_the_job_at_once(
    processes: WorkerProcesses, pipelines: Pipelines
) -> None:
    """Proves P10."""
    (pipelines.inputs / "seed").touch(mode=0o000)
    processes.start({"default": 1}, through=MEEK)
    code, message, hands = await fails(processes, await pipelines.submit(adds("one", files=["seed"])))
    assert (code, hands) == ("contract_violation", 0)
    assert message == "tasks[0].files[0]: seed cannot be read: Permission denied"
