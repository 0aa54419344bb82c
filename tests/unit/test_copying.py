"""A copy of a folder is what `cp -a` makes of it, although big files are copied beside the rest."""

import errno
import os
import socket
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import CacheFull
from holdfast.pipeline import copying
from holdfast.pipeline.copying import CopyFailed, copy_folder
from tests.support.disks import MIB, disk, missing
from tests.support.supervisor_harness import NOBODY, needs_root
from tests.support.users import as_nobody

BIG = 64 * 1024
BLOCK = 4096
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"


@pytest.fixture(autouse=True)
def big(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BIG", BIG)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What can be told from what it is not only by its bytes, most of it twice: in a big file and in a small one."""
    top = tmp_path / "source"
    for folder in ("empty", "only big/deep", "both", "other", "shut"):
        (top / folder).mkdir(parents=True)
    for size, kind in ((BIG + 1, "big"), (10, "small")):
        both = top / "both"
        for name in (kind, f"{kind} setuid", f"{kind} tagged", f"{kind} shared", f"-{kind}\n", f"{kind} later"):
            (both / name).write_bytes(os.urandom(size))
        odd = os.fsdecode(f"{kind} ".encode() + b"\xff")
        (both / odd).write_bytes(os.urandom(size))
        (both / f"{kind} setuid").chmod(0o6751)
        (both / f"{kind} shut").write_bytes(os.urandom(size))
        (both / f"{kind} shut").chmod(0o400)
        os.setxattr(both / f"{kind} tagged", "user.holdfast", b"kept")
        os.setxattr(both / f"{kind} shared", ACCESS, acl(6))
        os.link(both / kind, top / "other" / f"{kind} again")
        (top / "other" / f"{kind} link").symlink_to(f"../both/{kind}")
        (top / "shut" / kind).write_bytes(os.urandom(size))
        if os.geteuid() == 0:
            os.chown(both / odd, 65532, 65533)
            os.setxattr(both / f"{kind} tagged", "security.capability", struct.pack("<5I", 0x02000000, 1, 0, 0, 0))
    (top / "only big" / "deep" / "1").write_bytes(os.urandom(5 * BIG))
    with (top / "only big" / "hole").open("wb") as file:
        file.write(b"1" * BLOCK)
        file.seek(4 * BIG)
        file.write(b"2" * BLOCK)
        file.truncate(8 * BIG)
    os.setxattr(top / "only big", DEFAULT, acl(7))
    os.mkfifo(top / "other" / "fifo")
    with socket.socket(socket.AF_UNIX) as made, pytest.MonkeyPatch.context() as patch:
        patch.chdir(top / "other")
        made.bind("socket")
    (top / "both").chmod(0o2750)
    (top / "shut").chmod(0o500)
    for number, path in enumerate(sorted(top.rglob("*"))):
        future = 10**18 if path.name.endswith("later") else 0
        os.utime(path, ns=(10**18, 10**18 + future + number * 1001), follow_symlinks=False)
    os.utime(top, ns=(10**18, 10**18 + 7))
    return top


def acl(rights: int) -> bytes:
    """A list of rights in which one more user has some."""
    nobody = 0xFFFFFFFF
    entries = [(1, 6, nobody), (2, rights, NOBODY), (4, 4, nobody), (16, 7, nobody), (32, 0, nobody)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def everything(folder: Path) -> dict[str, Any]:
    """Return all attributes of a folder's entries. Hard links are reported under the first name."""
    names: dict[int, str] = {}
    entries = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        entry, name = path.lstat(), str(path.relative_to(folder))
        keys = os.listxattr(path, follow_symlinks=False)
        entries[name] = (
            oct(entry.st_mode),
            (entry.st_uid, entry.st_gid),
            entry.st_mtime_ns,
            {key: os.getxattr(path, key, follow_symlinks=False) for key in keys},
            os.readlink(path) if path.is_symlink() else None,
            (names.setdefault(entry.st_ino, name), path.read_bytes(), list(data_of(path))) if is_file(entry) else None,
        )
    return entries


def is_file(entry: os.stat_result) -> bool:
    return stat.S_ISREG(entry.st_mode)


def data_of(path: Path) -> Iterator[tuple[int, int]]:
    """Where a file has data; the rest is holes."""
    with path.open("rb") as file:
        end = 0
        while True:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            yield start, end


@pytest.mark.parametrize("to_disk", [True, False])
def test_copy_equals_that_of_cp(source: Path, tmp_path: Path, to_disk: bool) -> None:
    subprocess.run(["cp", "-a", "-T", source, tmp_path / "cp"], check=True)
    assert copy_folder(source, tmp_path / "made", to_disk=to_disk) == "copy"
    assert everything(tmp_path / "made") == everything(tmp_path / "cp") == everything(source)


@needs_root
def test_big_file_in_a_read_only_folder_is_copied() -> None:
    with tempfile.TemporaryDirectory() as place:
        top = Path(place)
        (top / "source" / "shut").mkdir(parents=True)
        (top / "source" / "shut" / "big").write_bytes(os.urandom(BIG))
        (top / "source" / "shut").chmod(0o500)
        for path in (top, *top.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        with as_nobody():
            copy_folder(top / "source", top / "made", to_disk=True)
        assert everything(top / "made") == everything(top / "source")


@needs_root
@pytest.mark.parametrize("name", ["big", "small"])
def test_file_that_cannot_be_read_fails_the_copy(name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        top = Path(place)
        (top / "source").mkdir()
        (top / "source" / name).write_bytes(os.urandom(BIG if name == "big" else 10))
        (top / "source" / name).chmod(0)
        os.chown(top, NOBODY, NOBODY)
        with as_nobody(), pytest.raises(CopyFailed, match="Permission denied"):
            copy_folder(top / "source", top / "made", to_disk=True)


@pytest.mark.parametrize("to_disk", [True, False])
def test_big_file_that_vanishes_fails_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_disk: bool) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "big").write_bytes(os.urandom(BIG))
    copy_times = copying._copy_times

    def vanish(source: Path, target: Path) -> None:
        copy_times(source, target)
        source.unlink()

    monkeypatch.setattr(copying, "_copy_times", vanish)
    with pytest.raises(CopyFailed, match="No such file"):
        copy_folder(tmp_path / "source", tmp_path / "made", to_disk=to_disk)


@pytest.mark.skipif(missing("ext4") is not None, reason=missing("ext4") or "")
@pytest.mark.parametrize("sizes", [[12 * MIB], [BIG - 1] * 200], ids=["big", "small"])
def test_disk_that_is_full_half_way_is_cache_full(tmp_path: Path, sizes: list[int]) -> None:
    """Whichever of the two copies it is that finds no room; the other one finds enough."""
    (tmp_path / "source").mkdir()
    for number, size in enumerate([BIG, 10, *sizes]):
        (tmp_path / "source" / str(number)).write_bytes(os.urandom(size))
    with disk(tmp_path, "ext4", 8 * MIB) as small, pytest.raises(CacheFull, match="No space left on device"):
        copy_folder(tmp_path / "source", small / "made", to_disk=True)


@pytest.mark.skipif(missing("ext4") is not None, reason=missing("ext4") or "")
def test_big_file_is_copied_once(tmp_path: Path) -> None:
    """There is no room for it twice, not even for a while; and its time is one that never passed yet."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "big").write_bytes(os.urandom(5 * MIB))
    os.utime(tmp_path / "source" / "big", (2**33, 2**33))
    with disk(tmp_path, "ext4", 8 * MIB) as small:
        copy_folder(tmp_path / "source", small / "made", to_disk=True)
        assert everything(small / "made") == everything(tmp_path / "source")
