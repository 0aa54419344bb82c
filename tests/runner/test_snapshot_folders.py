"""Snapshot folders: complete or absent after a crash at any step, and copied as the file system allows."""

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import CacheFull, SnapshotDamaged, SnapshotFailed
from holdfast.pipeline import copying
from holdfast.pipeline.copying import SUBVOLUME_ROOT, copy_folder, make_folder, probe, start_writeback
from holdfast.pipeline.snapshots import TEMPORARY, SnapshotFolders, WorkspaceChanged, summarise
from tests.support.disks import MIB, disk, missing
from tests.support.pipelines import open_folder
from tests.support.supervisor_harness import NOBODY, needs_root
from tests.support.users import as_nobody

ID = "a" * 64
STEPS = ["copy", "sync", "rename", "sync parent", "row"]
DIE = """
import os, signal, sys
from pathlib import Path
from holdfast.pipeline.snapshots import SnapshotFolders

def at(step):
    if step == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)

SnapshotFolders(Path(sys.argv[1]), at=at).copy(sys.argv[4], Path(sys.argv[2]))
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return fill(tmp_path / "work")


def fill(work: Path) -> Path:
    """A folder with what a database's has: modes, owners, links, empty folders, names that are no text."""
    work.mkdir(exist_ok=True)
    (work / "base").mkdir(mode=0o700)
    (work / "base" / "1").write_bytes(os.urandom(100_000))
    (work / "base" / "1").chmod(0o600)
    (work / "empty").mkdir(mode=0o750)
    (work / "link").symlink_to("base/1")
    (work / "dangling").symlink_to("/nowhere")
    Path(os.fsdecode(os.fsencode(work) + b"/\xff")).write_text("odd")
    if os.geteuid() == 0:
        os.chown(work / "base" / "1", 65532, 65533)
    return work


@needs_root
def test_snapshot_belongs_to_holdfast_and_grants_no_rights(folders: SnapshotFolders, workspace: Path) -> None:
    """Whatever the tasks did to their files: their uid is another attempt's one day. Proves I1, I2."""
    for path in (workspace, workspace / "base", workspace / "base" / "1", workspace / "link"):
        os.chown(path, 65532, 65532, follow_symlinks=False)
    (workspace / "base" / "1").chmod(0o6755)
    (workspace / "base").chmod(0o3777)
    made = folders.copy(ID, workspace)
    kept = folders.root / made.folder
    entries = [path.lstat() for path in (kept, *kept.rglob("*"))]
    assert {(entry.st_uid, entry.st_gid) for entry in entries} == {(0, 0)}
    assert ((kept / "base" / "1").stat().st_mode & 0o7777, (kept / "base").stat().st_mode & 0o7777) == (0o755, 0o777)
    assert (workspace / "link").lstat().st_uid == 65532


def contents(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def folders(tmp_path: Path) -> SnapshotFolders:
    return SnapshotFolders(tmp_path / "snapshots")


def test_copy_and_restore_keep_everything(folders: SnapshotFolders, workspace: Path, tmp_path: Path) -> None:
    """Proves P6."""
    made = folders.copy(ID, workspace)
    assert made.size == 100_003
    assert folders.names() == [made.folder]
    assert os.listdir(folders.root / TEMPORARY) == []
    folders.restore(made.folder, made.digest, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(workspace)
    assert summarise(tmp_path / "again").digest == made.digest
    assert summarise(tmp_path / "again").shape == summarise(workspace).shape


@pytest.mark.parametrize("step", STEPS)
def test_crash_at_any_step_leaves_no_partial_snapshot(folders: SnapshotFolders, workspace: Path, step: str) -> None:
    """Proves P6."""
    died = subprocess.run([sys.executable, "-c", DIE, folders.root, workspace, step, ID], check=False)
    assert died.returncode == -signal.SIGKILL
    for name in folders.names():
        assert contents(folders.root / name) == contents(workspace)
    assert len(folders.names()) == (STEPS.index(step) >= STEPS.index("sync parent"))
    made = folders.copy(ID, workspace)
    assert folders.sweep({made.folder}, grace=3600) == 0, "younger than the grace"
    assert folders.sweep({made.folder}, grace=-1) >= 1
    assert folders.names() == [made.folder]
    assert os.listdir(folders.root / TEMPORARY) == []
    assert folders.verify(made.folder, made.digest)


def test_sweep_keeps_the_files_of_a_live_builder(folders: SnapshotFolders, workspace: Path) -> None:
    """Proves P6."""
    swept = []
    busy = SnapshotFolders(
        folders.root, at=lambda step: swept.append(folders.sweep((), grace=-1)) if step == "sync" else None
    )
    made = busy.copy(ID, workspace)
    assert swept == [0]
    assert folders.verify(made.folder, made.digest)


@pytest.mark.parametrize("harm", ["cut", "gone", "added", "mode", "all"])
def test_snapshot_that_differs_from_the_published_one_is_refused(
    folders: SnapshotFolders, workspace: Path, tmp_path: Path, harm: str
) -> None:
    """Proves P6."""
    made = folders.copy(ID, workspace)
    place = folders.root / made.folder
    match harm:
        case "cut":
            os.truncate(place / "base" / "1", 99_999)
        case "gone":
            (place / "link").unlink()
        case "added":
            (place / "empty" / "new").touch()
        case "mode":
            (place / "base").chmod(0o777)
        case "all":
            folders.remove(made.folder)
    assert not folders.verify(made.folder, made.digest)
    with pytest.raises(SnapshotDamaged):
        folders.restore(made.folder, made.digest, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_snapshot_is_not_damaged_where_the_shared_folder_is_not_mounted(
    folders: SnapshotFolders, workspace: Path
) -> None:
    """Proves P6: its row must stay, for those who have the folder."""
    made = folders.copy(ID, workspace)
    folders.root.rename(folders.root.with_name("elsewhere"))
    with pytest.raises(SnapshotFailed, match=r"No such file.*HOLDFAST_SHARED_DIR mounted here.*/snapshots/a"):
        folders.verify(made.folder, made.digest)
    folders.root.with_name("elsewhere").rename(folders.root)
    assert folders.verify(made.folder, made.digest)


@needs_root
@pytest.mark.parametrize("shut", ["folder", "file"])
def test_snapshot_is_not_damaged_for_being_shut_to_us(shut: str) -> None:
    """Proves P6."""
    with open_folder() as top:
        os.chown(top, NOBODY, NOBODY)
        work = top / "work"
        work.mkdir()
        (work / "file").write_text("kept")
        (work / "file").chmod(0o600)
        work.chmod(0o700 if shut == "folder" else 0o755)
        folders = SnapshotFolders(top / "snapshots")
        made = folders.copy(ID, work)
        with as_nobody(), pytest.raises(SnapshotFailed, match=r"Permission denied, be the owner.*/snapshots/a"):
            folders.restore(made.folder, made.digest, top / "again")
        assert not (top / "again").exists()
        assert folders.verify(made.folder, made.digest)


def test_workspace_that_changes_while_it_is_copied_is_not_published(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves P6."""

    def restless(source: Path, target: Path, *, to_disk: bool = False) -> copying.Strategy:
        done = copy_folder(source, target)
        (source / "base" / "1").write_bytes(b"more")
        return done

    monkeypatch.setattr("holdfast.pipeline.snapshots.copy_folder", restless)
    folders = SnapshotFolders(tmp_path / "snapshots")
    with pytest.raises(WorkspaceChanged):
        folders.copy(ID, workspace)
    assert folders.names() == os.listdir(folders.root / TEMPORARY) == []


def test_copy_that_does_not_reach_the_disk_is_not_published(
    folders: SnapshotFolders, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves P6. The folder is compared while it is synced; the rename waits for both."""

    def failing(folder: Path) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr("holdfast.pipeline.snapshots.sync_filesystem", failing)
    with pytest.raises(SnapshotFailed, match="Input/output error"):
        folders.copy(ID, workspace)
    assert folders.names() == os.listdir(folders.root / TEMPORARY) == []


@pytest.mark.skipif(missing("ext4") is not None, reason=missing("ext4") or "")
def test_full_disk_is_cache_full_and_leaves_nothing(workspace: Path, tmp_path: Path) -> None:
    """Proves P6, P11."""
    with disk(tmp_path, "ext4", 8 * MIB) as small:
        folders = SnapshotFolders(small / "snapshots")
        made = folders.copy(ID, workspace)
        (workspace / "big").write_bytes(os.urandom(10 * MIB))
        with pytest.raises(CacheFull, match="No space left on device"):
            folders.copy("b" * 64, workspace)
        assert folders.names() == [made.folder]
        assert os.listdir(folders.root / TEMPORARY) == []
        assert folders.verify(made.folder, made.digest)
        (workspace / "big").unlink()
        assert folders.copy("b" * 64, workspace).size == made.size
        assert folders.strategy == "copy"


@pytest.fixture
def cow(tmp_path: Path) -> Iterator[Path]:
    """A folder on a btrfs."""
    if reason := missing("btrfs"):
        pytest.skip(reason)
    with disk(tmp_path, "btrfs", 128 * MIB) as mounted:
        yield mounted


def test_subvolumes_are_copied_in_one_step_and_stay_apart(cow: Path) -> None:
    """Proves P6."""
    folders = SnapshotFolders(cow / "snapshots")
    assert folders.strategy == "subvolume"
    make_folder(cow / "work")
    fill(cow / "work")
    assert copy_folder(cow / "work", cow / "direct") == "subvolume"
    made = folders.copy(ID, cow / "work")
    assert os.lstat(folders.root / made.folder).st_ino == SUBVOLUME_ROOT
    (cow / "work" / "base" / "1").write_text("later")
    folders.restore(made.folder, made.digest, cow / "again")
    assert os.lstat(cow / "again").st_ino == SUBVOLUME_ROOT
    assert (cow / "again" / "base" / "1").stat().st_size == 100_000
    (cow / "again" / "base" / "1").write_text("other")
    assert folders.verify(made.folder, made.digest)
    folders.remove(made.folder)
    assert folders.names() == os.listdir(folders.root / TEMPORARY) == []


def test_plain_folder_on_btrfs_shares_blocks_and_becomes_a_subvolume(cow: Path) -> None:
    """Proves P6."""
    (cow / "work").mkdir()
    (cow / "work" / "big").write_bytes(os.urandom(int(shutil.disk_usage(cow).free * 0.6)))
    folders = SnapshotFolders(cow / "snapshots")
    made = folders.copy(ID, cow / "work")  # Does not fit twice: it is there only if its blocks are shared.
    assert os.lstat(folders.root / made.folder).st_ino == SUBVOLUME_ROOT
    folders.restore(made.folder, made.digest, cow / "again")
    assert summarise(cow / "again").shape == summarise(cow / "work").shape


def test_nested_subvolume_is_not_lost(cow: Path) -> None:
    """Proves P6."""
    make_folder(cow / "work")
    make_folder(cow / "work" / "inner")
    (cow / "work" / "inner" / "file").write_text("kept")
    folders = SnapshotFolders(cow / "snapshots")
    made = folders.copy(ID, cow / "work")
    assert (folders.root / made.folder / "inner" / "file").read_text() == "kept"


def test_reflinks_are_found_by_trying(tmp_path: Path, cow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_make_subvolume", lambda path: False)
    assert probe(cow) == "reflink"
    assert probe(tmp_path) == "copy"
    assert list(cow.iterdir()) == []


CACHESTAT = 451


def dirty_pages(path: Path) -> int | None:
    """How many pages of a file wait to be written, or are on their way; None: this kernel does not tell."""
    whole, counts = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)()
    with path.open("rb") as file:
        answer = ctypes.CDLL(None).syscall(CACHESTAT, file.fileno(), whole, counts, 0)
    return counts[1] + counts[2] if answer == 0 else None


@pytest.mark.skipif(missing("ext4") is not None, reason=missing("ext4") or "")
def test_copy_is_written_back_while_it_runs(tmp_path: Path) -> None:
    """A sync at the end has only the rest to do. Here the writer has not ended, and nobody else syncs this disk."""
    with disk(tmp_path, "ext4", 32 * MIB) as place:
        script = f"exec 3> made; head -c {8 * MIB} /dev/zero >&3; echo whole; read gate"
        with subprocess.Popen(["sh", "-c", script], cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
            assert writer.stdin is not None
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"whole\n"
            if (before := dirty_pages(place / "made")) is None:
                pytest.skip("this kernel does not say what is dirty")
            thread = threading.Thread(target=start_writeback, args=(writer, place))
            thread.start()
            deadline = time.monotonic() + 60
            while (left := dirty_pages(place / "made")) and time.monotonic() < deadline:
                time.sleep(0.01)  # Reason: the kernel sends no event; this only spaces the questions.
            writer.stdin.write(b"\n")
            writer.stdin.flush()
            thread.join()
        assert (left, before > 0) == (0, True)
