"""Removes the folders of ended attempts, many at a time.

Removing a tree takes dozens of system calls, and a Python thread waits for the interpreter's lock after each of them.
So `rm` does it, in one process for all folders that arrived while the last one ran. The sweep removes what is left.
"""

import asyncio
import os
import shutil
from pathlib import Path

from holdfast.runner.exits import ProcessExits
from holdfast.runner.tree_removal import remove_tree


class FolderRemover:
    """Removes folders for all attempts of a runner."""

    def __init__(self, children: ProcessExits) -> None:
        self._children = children
        self._rm = shutil.which("rm", path=os.defpath)
        self._waiting: list[Path] = []
        self._lock = asyncio.Lock()

    async def remove(self, *folders: Path) -> None:
        """Remove folders that exist. Returns after the attempt, even if something is left."""
        mine = self._waiting
        mine.extend(folders)
        async with self._lock:
            if mine is self._waiting:  # Otherwise the previous holder of the lock removed ours too.
                self._waiting = []
                await self._remove(mine)

    async def _remove(self, folders: list[Path]) -> None:
        if self._rm is None:
            for folder in folders:
                await asyncio.to_thread(remove_tree, folder)
        else:
            await self._children.watch(_spawn([self._rm, "-rf", "--", *map(str, folders)]))


def _spawn(command: list[str]) -> int:
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    return os.posix_spawn(command[0], command, {}, file_actions=quiet)
