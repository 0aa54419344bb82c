"""What is written to the disk before it counts, seen by strace: the end of an attempt, uploads, snapshots, the host."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.runner import supervisor
from holdfast.runner.launcher import encode_launch
from tests.supervisor.test_launcher import Helper, records
from tests.support.supervisor_harness import SupervisedAttempt, shell

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
CALLS = "trace=fsync,fdatasync,syncfs,rename,renameat,renameat2"
STRACE = ("strace", "-f", "-y", "-s", "300", "-e", CALLS, "-o")


def syncs_in(trace: Path) -> list[str]:
    """Return the calls that succeeded, in order: "fsync NAME" and "rename NEW-NAME"."""
    found = []
    unfinished: dict[str, str] = {}
    for line in trace.read_text().splitlines():
        pid, _, call = line.partition(" ")
        if call.endswith("<unfinished ...>"):
            unfinished[pid] = call.removesuffix("<unfinished ...>").strip()
        if "resumed>" in call:
            call = unfinished.pop(pid) + call.partition("resumed>")[2].strip()
        if " = 0" not in call:
            continue
        if synced := re.search(r"(fsync|fdatasync|syncfs)\(\d+<(.*?)>\)", call):
            found.append(f"{synced[1]} {Path(synced[2]).name}")
        elif renamed := re.search(r"rename\w*\(.*\"(.*?)\"(?:, \w+)?\)", call):
            found.append(f"rename {Path(renamed[1]).name}")
    return found


def assert_end_is_synced(calls: list[str], folder: str) -> None:
    """The content of `exit` is on the disk before its name, and its name before the supervisor exits."""
    assert [call for call in calls if "exit" in call or call.startswith("fsync")] == [
        "fsync exit.tmp",
        "rename exit",
        f"fsync {folder}",
    ]


def test_end_of_an_attempt_is_synced(tmp_path: Path) -> None:
    """Proves R10."""
    attempt = SupervisedAttempt(tmp_path / "attempt")
    try:
        attempt.write(*shell("true"))
        attempt.supervise(wrap=(*STRACE, str(tmp_path / "trace")), env={"PATH": "/usr/bin:/bin"})
        assert attempt.end().code == 0
    finally:
        attempt.clean()
    assert_end_is_synced(syncs_in(tmp_path / "trace"), "attempt")


@pytest.mark.parametrize("spare", [False, True], ids=["new-folder", "spare-folder"])
def test_end_of_a_launched_attempt_is_synced(tmp_path: Path, spare: bool) -> None:
    """Proves R10: also in a folder that is used again, whose `exit` is an old file."""
    pool = tmp_path / "pool"
    pool.mkdir()
    if spare:
        (pool / "1").mkdir()
        (pool / "1" / "exit.tmp").write_text("old" * 1000)
        (pool / "1" / "exit.tmp").chmod(0o600)
    launch = Helper(
        *STRACE[1:], str(tmp_path / "trace"), str(supervisor.path()),
        "--launch", str(pool), " " * 4096, program=Path(shutil.which("strace") or ""),
    )  # fmt: skip
    launch.socket.send(encode_launch(1, records(tmp_path / "job.1", "/bin/true")))
    launch.report()
    launch.report()
    assert launch.close() == 0
    assert (tmp_path / "job.1" / "exit").read_text().endswith("}\n")
    assert_end_is_synced(syncs_in(tmp_path / "trace"), "job.1")


def traced(tmp_path: Path, code: str) -> list[str]:
    """Run Python code in a folder, and return its syncs and renames."""
    command = [*STRACE, str(tmp_path / "trace"), sys.executable, "-c", f"from pathlib import Path\n{code}"]
    subprocess.run(command, check=True, cwd=tmp_path)
    return syncs_in(tmp_path / "trace")


def test_record_of_the_host_is_synced(tmp_path: Path) -> None:
    code = "from holdfast.runner.state_folder import StateFolder\nStateFolder(Path('state'))"
    assert "fsync boots" in traced(tmp_path, code)


def test_upload_is_synced_before_it_is_published(tmp_path: Path) -> None:
    code = """
from holdfast.runner.folder_artifacts import FolderArtifacts
writer = FolderArtifacts(Path('shared')).upload_writer('tenant', 'upload')
with writer.create('file') as file:
    file.write(b'x')
writer.publish()
"""
    assert traced(tmp_path, code) == ["fsync file", "rename upload"]


def test_snapshot_is_synced_before_it_is_published_and_then_its_name(tmp_path: Path) -> None:
    code = """
from holdfast.pipeline.snapshots import SnapshotFolders
Path('work').mkdir()
Path('work/file').write_text('x')
SnapshotFolders(Path('snapshots')).copy('snapshot', Path('work'))
"""
    first, published, last = [call.partition(" ")[0] for call in traced(tmp_path, code)[-3:]]
    assert (first, published, last) == ("syncfs", "rename", "fsync")
    assert syncs_in(tmp_path / "trace")[-1] == "fsync snapshots"
