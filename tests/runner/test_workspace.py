"""The workspace of an attempt on disk: its owner and its plan."""

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.runner.base import Identity, StartRequest, StartTooLate
from holdfast.runner.process import ProcessRunner
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.wire import WireTask
from holdfast.runner.workspace import Programs, WorkspacePaths, give_like, make_workspace, read_plan
from tests.support.supervisor_harness import NOBODY, needs_root

IDENTITY = Identity("test", "01a1dfaf-a325-7000-8cd1-5ad758728aef", 1)


class Staging:
    """A plan with one file."""

    def __init__(self, name: str) -> None:
        self.plan = name.encode()
        self._name = name

    def programs(self, place: WorkspacePaths) -> Programs:
        return Programs(tasks=(WireTask(name="one", argv=("cat", f"{place.inputs}/{self._name}"), cwd=place.tree),))

    def make_tree(self, tree: Path) -> None:
        tree.mkdir()

    def prepare(self, tree: Path, uid: int) -> bool:
        return False

    def stage(self, inputs: Path) -> None:
        (inputs / self._name).write_text(self._name)


async def test_next_owner_replaces_a_plan_that_never_started(tmp_path: Path) -> None:
    """Proves P9, R4: what another owner staged and never started is replaced completely."""
    runner = ProcessRunner(StateFolder(tmp_path), "test", user=None, log_cap=1 << 20)

    async def confirm() -> None:
        pass

    def order(name: str, **more: Any) -> StartRequest:
        spec: dict[str, Any] = {"tasks": []}
        return StartRequest(
            identity=IDENTITY, domain=runner.domain, token=1, spec=spec, inputs={},
            start_by=0.0, pipeline=Staging(name), **more,
        )  # fmt: skip

    for name in ("first", "second"):
        with pytest.raises(StartTooLate):
            await runner.start(order(name), confirm)
        space = runner.folder(IDENTITY).path / "space"
        assert read_plan(space).decode() == name
        assert os.listdir(space / "inputs") == [name]
        assert name in (space.parent / "spec").read_text()
        (space / "tree" / "left").touch()
    runner.close()


def test_plan_is_out_of_reach_of_tasks_and_must_be_a_regular_file(tmp_path: Path) -> None:
    """Proves P2, R25: a container has the space alone; no link is followed, and nobody waits for a FIFO's writer."""
    make_workspace(tmp_path, Staging("file"), None, None, own=True)
    space, plan = tmp_path / "space", tmp_path / "plan"
    assert sorted(os.listdir(space)) == ["inputs", "tree"]
    assert (read_plan(space), plan.stat().st_mode & 0o777) == (b"file", 0o600)
    plan.rename(tmp_path / "other")
    plan.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        read_plan(space)
    plan.unlink()
    os.mkfifo(plan)
    with pytest.raises(OSError, match="not a plain file"):
        read_plan(space)


@needs_root
def test_tree_and_inputs_are_the_users_and_the_rest_is_not(tmp_path: Path) -> None:
    """Proves R25: a link in the workspace is changed itself, and not what it leads to."""
    make_workspace(tmp_path, Staging("file"), NOBODY, NOBODY)
    space = tmp_path / "space"
    assert space.stat().st_uid == os.geteuid()
    assert {path.stat().st_uid for path in (space / "tree", space / "inputs", space / "inputs" / "file")} == {NOBODY}
    restored, outside = tmp_path / "restored", tmp_path / "outside"
    restored.mkdir()
    outside.touch()
    (restored / "link").symlink_to(outside)
    give_like(restored, space / "tree")
    assert (restored.stat().st_uid, (restored / "link").lstat().st_uid) == (NOBODY, NOBODY)
    assert outside.stat().st_uid == os.geteuid()
