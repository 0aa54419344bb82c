"""Reports writes to a file at once, by inotify. Without it (not Linux, or no instance left) the caller has to poll."""

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

IN_MODIFY = 0x2
"""From <sys/inotify.h>: the file was written to."""
EVENTS_BYTES = 64 * 1024


class FileWrites:
    """Tells whether the file was written to since the last call."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = asyncio.Event()

    def heard(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, EVENTS_BYTES)
        self._written.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for a write, at most for these seconds. Return whether there was one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._written.wait()
        written = self._written.is_set()
        self._written.clear()
        return written


@contextlib.contextmanager
def watch_writes(path: Path) -> Iterator[FileWrites | None]:
    """Watch a file inside the block; None if the kernel cannot do it."""
    descriptor = _watch(path)
    if descriptor is None:
        yield None
        return
    loop = asyncio.get_running_loop()
    writes = FileWrites(descriptor)
    loop.add_reader(descriptor, writes.heard)
    try:
        yield writes
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _watch(path: Path) -> int | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return None
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(path), IN_MODIFY) < 0:
        os.close(descriptor)
        return None
    return descriptor
