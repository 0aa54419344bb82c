"""Turns to start a container: a few at a time on one engine, by all workers of this host together.

Twenty starts that are asked for at once each take as long as all twenty, and all come too late for their leases. In
turns the first is done at once, and the last no later. A turn is the lock of a file, which falls with whoever holds it.
It spares the engine, and nothing else rests on it: what cannot be locked is started without.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import time
from pathlib import Path

from holdfast.timing import jitter

LOOK_SECONDS = 0.02
LONGEST = 6.0
"""Seconds after which a turn is over, though its holder, which may be stopped, does not say so."""


class Turn:
    def __init__(self, free: asyncio.Semaphore, fd: int | None) -> None:
        self._free = free
        self._fd = fd
        self._over = False

    def end(self) -> None:
        if self._over:
            return
        self._over = True
        if self._fd is not None:
            os.close(self._fd)
        self._free.release()


class Turns:
    """So many turns at once, for all who use this folder."""

    def __init__(self, folder: Path, domain: str, most: int) -> None:
        self._folder = folder / hashlib.sha256(domain.encode()).hexdigest()[:16]
        self.made_for = (domain, most)
        self._most = most
        # Those of this worker wait here, which costs no looking.
        self._free = asyncio.Semaphore(most)

    async def take(self) -> Turn:
        await self._free.acquire()
        try:
            return Turn(self._free, await self._lock_one())
        except BaseException:
            self._free.release()
            raise

    async def _lock_one(self) -> int | None:
        """Lock one of the files, once one is free; None where there can be none."""
        try:
            self._folder.mkdir(mode=0o711, parents=True, exist_ok=True)
            while True:
                for n in range(self._most):
                    with contextlib.suppress(BlockingIOError):
                        return _lock(self._folder / str(n))
                await asyncio.sleep(jitter(LOOK_SECONDS, 0.5))
        except OSError:
            return None


def _lock(path: Path) -> int:
    """Lock a file, now or not at all. One that was locked for too long makes room for another of its name."""
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
