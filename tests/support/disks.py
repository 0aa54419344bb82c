"""Small filesystems for tests, on loop devices or in memory: soon full, or with copy on write. Root only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MIB = 1024 * 1024
PAGE = 4096
PLACES = "/usr/sbin:/sbin:/usr/bin:/bin"


def missing(kind: str) -> str | None:
    """Why a filesystem of this kind cannot be had here; None if it can."""
    if os.geteuid() != 0:
        return "only root may mount a filesystem"
    if shutil.which(f"mkfs.{kind}", path=PLACES) is None:
        return f"there is no mkfs.{kind}: `make setup` installs it"
    return None


@contextmanager
def disk(folder: Path, kind: str, size: int) -> Iterator[Path]:
    """Mount a new filesystem while the block lasts."""
    image, mounted = folder / f"{kind}.img", folder / kind
    with image.open("wb") as file:
        file.truncate(size)
    mounted.mkdir()
    _run(f"mkfs.{kind}", "-q", image)
    _run("mount", "-o", "loop", image, mounted)
    try:
        yield mounted
    finally:
        _run("umount", mounted)
        image.unlink()


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, env={"PATH": PLACES})


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Mount a filesystem in memory while the block lasts."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)  # A worker process may still be leaving.


class FullDisk:
    """A tmpfs on which a number of pages, or of files, is free."""

    def __init__(self, place: Path, what: str) -> None:
        self.place = place
        self.what = what

    def leave(self, free: int) -> None:
        """Fill the disk, except for this number of pages or files."""
        self.clear()
        if self.what == "pages":
            with (self.place / "filler").open("wb", 0) as file:
                left = os.statvfs(self.place).f_bavail - free
                file.write(b"x" * PAGE * max(0, left))
            return
        with suppress(OSError):  # A worker may take one of them at the same time.
            for n in range(os.statvfs(self.place).f_favail - free):
                (self.place / f"filler.{n}").touch()

    def clear(self) -> None:
        for path in self.place.glob("filler*"):
            path.unlink()
