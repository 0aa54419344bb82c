"""Start markers and pauses on a full disk, without a worker: nothing starts, and no half-written file counts."""

import errno
import os
from pathlib import Path

import pytest

from holdfast.runner.attempt_folder import AttemptFolder, write_new
from holdfast.runner.base import NoSpace
from holdfast.runner.spare_markers import SPARES, SpareMarkers
from holdfast.runner.start_pause import StartPause, needs_space
from tests.support.disks import PAGE, FullDisk, tmpfs
from tests.support.supervisor_harness import needs_root


@needs_root
@pytest.mark.parametrize("what", ["pages", "files"])
def test_missing_folder_is_forbidden_by_a_spare_marker_on_a_full_disk(tmp_path: Path, what: str) -> None:
    with tmpfs(tmp_path / "disk", "size=256k,nr_inodes=80") as place:
        disk, markers = FullDisk(place, what), SpareMarkers(place / "spare")
        (place / "attempts").mkdir()
        markers.refill()
        for n in range(SPARES):
            os.utime(place / "spare" / str(n), (0, 0))
        disk.leave(0)
        folders = [AttemptFolder(place / "attempts" / f"job.{n}") for n in range(SPARES + 1)]
        for folder in folders[:SPARES]:
            assert markers.forbid(folder)
            assert folder.forbidden()
            assert folder.path.stat().st_mtime > 0, "it is kept as long as one that is made now"
            assert markers.forbid(folder)
        with pytest.raises(OSError, match="No space"):
            markers.forbid(folders[-1])
        assert not folders[-1].path.exists()
        disk.clear()
        assert markers.forbid(folders[-1])
        markers.refill()
        assert len(list((place / "spare").iterdir())) == SPARES


@pytest.mark.parametrize("name", ["started", "exit"])
def test_folder_that_appears_first_is_not_replaced_by_a_marker(tmp_path: Path, name: str) -> None:
    """A slow previous owner made it between our look and our rename."""
    markers = SpareMarkers(tmp_path / "spare")
    markers.refill()
    folder = AttemptFolder(tmp_path / "job.1")
    folder.create()
    (folder.path / name).write_text("{}")
    assert not markers._place(folder.path)
    assert not markers.forbid(folder)
    assert (folder.path / name).read_text() == "{}"


def test_file_that_does_not_fit_whole_is_an_error(tmp_path: Path) -> None:
    """A write on a nearly full disk may be short: that must not pass for a file."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a filesystem")
    with tmpfs(tmp_path / "disk", "size=16k") as place:
        with pytest.raises(OSError, match="No space") as error:
            write_new(place / "file", b"x" * 5 * PAGE)
        assert error.value.errno == errno.ENOSPC


def test_start_marker_is_written_on_a_full_disk(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a filesystem")
    with tmpfs(tmp_path / "disk", "size=64k") as place:
        folder = AttemptFolder(place / "attempt")
        folder.create()
        folder.write_spares()
        FullDisk(place, "pages").leave(0)
        assert folder.forbid()
        assert folder.forbidden()
        folder.reduce_to_marker()
        assert {path.name for path in folder.path.iterdir()} == {"lock", "started"}


def test_pauses_grow_while_starts_fail_and_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("holdfast.runner.start_pause.time.monotonic", lambda: now)
    pause = StartPause()
    found = []
    for _ in range(8):
        pause.begin("full")
        pause.begin("full, too")
        assert pause.why == "full"
        found.append(pause.left)
        now += pause.left
        assert pause.why is None
    assert found == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    now += 61.0
    pause.begin("full")
    assert pause.left == 2.0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_and_full_quota_are_no_space(number: int) -> None:
    with pytest.raises(NoSpace, match=os.strerror(number)), needs_space("cannot write"):
        raise OSError(number, os.strerror(number))
    with pytest.raises(PermissionError), needs_space("cannot write"):
        raise PermissionError(errno.EACCES, "no")
