"""Start slots: limit how many containers start at a time on one engine, across all workers of this host.

Twenty concurrent starts each take as long as all twenty, and all miss the deadlines of their leases. With slots the
first is done soon, and the last no later. A slot is a file lock, which is released when its holder dies. Slots only
protect the engine from overload: if no file can be locked, the container is started without a slot.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import time
from pathlib import Path

from holdfast.permissions import make_folder
from holdfast.timing import jitter

POLL_SECONDS = 0.02
LONGEST = 6.0
"""Seconds after which a slot is free again, even if its holder, which may be suspended, did not release it."""


class StartSlot:
    def __init__(self, free: asyncio.Semaphore, fd: int | None) -> None:
        self._free = free
        self._fd = fd
        self._over = False

    def release(self) -> None:
        if self._over:
            return
        self._over = True
        if self._fd is not None:
            os.close(self._fd)
        self._free.release()


class StartSlots:
    """A number of slots shared by all processes that use this folder."""

    def __init__(self, folder: Path, domain: str, most: int) -> None:
        self._folder = folder / hashlib.sha256(domain.encode()).hexdigest()[:16]
        self.made_for = (domain, most)
        self._most = most
        # Starts of this worker wait here, without polling.
        self._free = asyncio.Semaphore(most)

    async def take(self) -> StartSlot:
        await self._free.acquire()
        try:
            return StartSlot(self._free, await self._lock_one())
        except BaseException:
            self._free.release()
            raise

    async def _lock_one(self) -> int | None:
        """Lock one of the files once one is free; None if files cannot be locked here."""
        try:
            make_folder(self._folder)
            while True:
                for n in range(self._most):
                    with contextlib.suppress(BlockingIOError):
                        return _lock(self._folder / str(n))
                await asyncio.sleep(jitter(POLL_SECONDS, 0.5))
        except OSError:
            return None


def _lock(path: Path) -> int:
    """Try to lock a file without waiting. A file that was locked for too long is replaced by a new one."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.utime(fd)
    except BlockingIOError:
        if time.time() - os.fstat(fd).st_mtime > LONGEST:
            path.unlink(missing_ok=True)
        os.close(fd)
        raise
    except BaseException:
        os.close(fd)
        raise
    return fd
