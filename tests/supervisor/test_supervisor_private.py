"""The private mounts of an attempt, and the kill of every process of its user."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.runner.supervisor.protocol import ExitCause
from holdfast.runner.wire import WireTask
from tests.support.pipelines import open_folder
from tests.support.supervisor_harness import SupervisedAttempt, needs_root, shell

pytestmark = needs_root

UID = 2_100_070_000
OWN = {"uid": UID, "gid": UID, "sole_user": True, "private": True}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SupervisedAttempt]:
    """An attempt whose user can get to its folder, which is below /tmp."""
    with open_folder() as folder:
        attempt = SupervisedAttempt(folder / "attempt")
        yield attempt
        attempt.clean()


def test_a_private_view_has_nothing_of_others(own: SupervisedAttempt) -> None:
    """Also under limits that hold for the program alone. Proves I1."""
    Path("/tmp/holdfast-not-for-jobs").touch()
    try:
        script = (
            "id -un; ls /tmp/holdfast-not-for-jobs /proc/1 2>&1 | grep -c cannot; ls -A /dev/shm /var/tmp | wc -l; "
            "tail -n +2 /proc/sysvipc/shm | wc -l; stat -c %a:%u /tmp; tail -n 1 /etc/group; "
            "touch /tmp/mine; ls /var/tmp/mine"
        )
        assert own.run(*shell(script), **OWN, limits={"fsize": 1}).cause is ExitCause.EXIT
    finally:
        os.unlink("/tmp/holdfast-not-for-jobs")
    lines = own.output().decode().splitlines()
    assert lines[:2] == [f"holdfast-{UID}", "2"]
    assert int(lines[2]) <= 5  # The two names, a line between, and the way to the attempt's folder.
    assert lines[3:] == ["0", f"700:{UID}", f"holdfast-{UID}:x:{UID}:", "/var/tmp/mine"]
    assert (own.folder.path / "tmp" / "mine").exists()
    assert not os.path.exists("/tmp/mine")


def test_a_link_in_the_way_to_its_folder_is_not_followed(own: SupervisedAttempt, tmp_path: Path) -> None:
    """The second task's view is made by root, in a /tmp that the first one could change. Proves I1."""
    top = own.folder.path.parent
    swap = f"mv {top} /tmp/away; ln -s /var/lib {top}; ls -d {top}"
    before = sorted(os.listdir("/var/lib"))
    tasks = (WireTask(name="swap", argv=shell(f"cd /; {swap}; true")), WireTask(name="next", argv=shell("true")))
    own.run(tasks=tasks, **OWN)
    assert sorted(os.listdir("/var/lib")) == before


def test_everything_of_its_user_is_dead_before_the_end_is_recorded(own: SupervisedAttempt) -> None:
    """Also what does not descend from the supervisor. Proves I1."""
    stray = subprocess.Popen(["sleep", "600"], user=UID, group=UID, extra_groups=(), start_new_session=True)
    try:
        assert own.run(*shell("exit 3"), **OWN).code == 3
        assert stray.wait(10) == -signal.SIGKILL
    finally:
        stray.kill()
        stray.wait()


@pytest.mark.parametrize("flag", ["sole_user", "private"])
def test_neither_is_for_root(own: SupervisedAttempt, flag: str) -> None:
    ended = own.run("true", **{flag: True})
    assert (ended.cause, ended.text) == (ExitCause.START_FAILED, "malformed spec: a uid of its own is missing")
