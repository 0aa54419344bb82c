"""Pipelines whose worker may not read or write what it has to: they end with a word that says why, and harm nobody."""

import os
from pathlib import Path

import pytest

from holdfast.model import Job, Status
from tests.attempt import needs_root
from tests.fleet import Fleet
from tests.pipelines import Pipes, adds
from tests.users import MEEK

pytestmark = needs_root


@pytest.fixture
def pipes(fleet: Fleet, tmp_path: Path) -> Pipes:
    return Pipes(fleet, tmp_path)


async def fails(fleet: Fleet, job: Job) -> tuple[str, str, int]:
    """The code and the words that a job fails with, and how often it changed hands."""
    ended = await fleet.ended(job, Status.FAILED)
    assert ended.error is not None
    return ended.error.code, ended.error.message, len(await fleet.events(job, "lease"))


@pytest.mark.parametrize("trouble", ["shut", "not mounted"])
async def test_snapshot_that_cannot_be_read_here_stays_for_others(fleet: Fleet, pipes: Pipes, trouble: str) -> None:
    """Proves P4, P6: it is not taken for a damaged one."""
    fleet.start({"default": 1}, through=MEEK)
    await fleet.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    root = fleet.settings.shared / "snapshots"
    if trouble == "shut":
        root.chmod(0)
        reason = "Permission denied, be the owner of its files, or root"
    else:
        root.rename(root.with_name("elsewhere"))
        reason = "No such file or directory, is HOLDFAST_SHARED_DIR mounted here?"
    known, more = await pipes.submit(adds("one"), adds("two")), await pipes.submit(adds("one"), adds("three"))
    for job in (known, more):
        code, message, hands = await fails(fleet, job)
        assert (code, reason in message, str(root) in message, hands) == ("snapshot_failed", True, True, 0)
    if trouble == "shut":
        root.chmod(0o755)
    else:
        os.rename(root.with_name("elsewhere"), root)
    assert await pipes.kept() == ["one", "two"]
    again = await fleet.ended(await pipes.submit(adds("one"), adds("two")), Status.SUCCEEDED)
    assert (await pipes.statuses(again), pipes.ran()) == (["cached", "cached"], ["one", "two"])
