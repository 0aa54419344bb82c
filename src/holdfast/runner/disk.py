"""Free space on the disks of an installation, compared with the reserve.

Below the reserve (`HOLDFAST_DISK_RESERVE`) no job starts and nothing new is stored on that disk, so that running jobs
can end, and jobs can be cancelled and deleted.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path

from holdfast.config import Settings
from holdfast.limits import size_text

LOOK_SECONDS = 1.0
"""How long a measurement is valid: it costs a system call per disk, and a network disk may be slow."""
REMEDY = "free some space, delete jobs with force, or lower the reserve"


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, or of the nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


class Disks:
    """The disks of the database, the state folder and the shared folder. Without a reserve, no disk is ever low."""

    def __init__(self, folders: Mapping[str, Path], reserve: int | None) -> None:
        self._folders = folders
        self.reserve = reserve
        self._looked = float("-inf")
        self._looking = asyncio.Lock()
        self.low: Mapping[str, str] = {}
        """The disks that were below the reserve at the last measurement, each with a message for people."""

    async def look(self) -> Mapping[str, str]:
        """Measure all disks, unless that was done a moment ago. Runs in a thread, because a disk may not answer."""
        async with self._looking:
            if self.reserve is not None and time.monotonic() - self._looked >= LOOK_SECONDS:
                self.low = await asyncio.to_thread(self._look)
                self._looked = time.monotonic()
        return self.low

    def _look(self) -> Mapping[str, str]:
        found = {name: self.shortage(name) for name in self._folders}
        return {name: why for name, why in found.items() if why is not None}

    def shortage(self, name: str) -> str | None:
        """Measure one disk now, in this thread. Return a message for people if it is below the reserve."""
        if self.reserve is None or name not in self._folders:
            return None
        try:
            free = free_bytes(self._folders[name])
        except OSError:
            return None  # The code that uses the folder reports the error, with more detail.
        if free >= self.reserve:
            return None
        return (
            f"the disk of the {name} has {size_text(free)} free, less than "
            f"HOLDFAST_DISK_RESERVE ({size_text(self.reserve)}): {REMEDY}"
        )


DATABASE, STATE, SHARED = "database", "state folder", "shared folder"


def disks_of(settings: Settings, *, state: bool) -> Disks:
    """Return the disks that this process uses; only a worker uses the state folder."""
    folders = {SHARED: settings.shared}
    if state:
        folders[STATE] = settings.state
    if settings.sqlite_file is not None:
        folders[DATABASE] = settings.sqlite_file.parent
    return Disks(folders, settings.disk_reserve)
