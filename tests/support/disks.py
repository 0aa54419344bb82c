"""Small filesystems for tests, on loop devices: one that is soon full, one that copies on write. Only root has them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 1024 * 1024
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
