"""Removes the folders of ended attempts, many at a time, in a process of its own (`remove.c`).

Removing a tree takes dozens of system calls, and a Python thread waits for the interpreter's lock after each of them.
So the remover does it, in one request for all folders that arrived while it worked on the last one. It keeps some
folders for later attempts (`spare_folder.c`). The sweep removes what is left.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.runner.exits import ProcessExits
from holdfast.runner.helper_process import HelperProcess
from holdfast.runner.tree_removal import remove_tree

log = logging.getLogger(__name__)

MOST_BYTES = 32 * 1024
"""Bytes of paths in one request; the remover takes twice as many."""


class FolderRemover:
    """Removes folders for all attempts of a runner. Folders in `spare_folders` are used again."""

    def __init__(self, children: ProcessExits, spare_folders: Path) -> None:
        self._children = children
        self._spare_folders = spare_folders
        self._process: HelperProcess | None = None
        self._waiting: list[str] = []
        self._answer: asyncio.Future[bytes] | None = None
        self._lock = asyncio.Lock()

    async def remove(self, *folders: Path, keep: Path | None = None) -> None:
        """Remove folders that exist; `keep` is one of an attempt that may be used again.

        Returns after the attempt, even if something is left.
        """
        mine = self._waiting
        mine.extend(map(str, folders))
        if keep is not None:
            mine.append(f"+{keep}")
        async with self._lock:
            if mine is self._waiting:  # Otherwise the previous holder of the lock removed ours too.
                self._waiting = []
                for batch in _batches(mine):
                    await self._remove(batch)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    async def _remove(self, paths: Sequence[str]) -> None:
        """Remove folders by the remover, and what it left in a thread: it may be nested too deep."""
        answer = b""
        try:
            process = self._running()
            self._answer = asyncio.get_running_loop().create_future()
            process.send(b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths))
            answer = await self._answer
        except (OSError, ConfigError) as error:
            log.warning("cannot start the remover of folders; removing them in a thread: %s", error)
        for n, path in enumerate(paths):
            if n >= len(answer) or not answer[n]:
                await asyncio.to_thread(remove_tree, Path(path.removeprefix("+")))

    def _running(self) -> HelperProcess:
        if self._process is None:
            arguments = ["--remove", str(self._spare_folders)]
            self._process = HelperProcess(self._children, arguments, on_message=self._on_answer, on_gone=self._on_gone)
        return self._process

    def _on_answer(self, message: bytes) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def _on_gone(self) -> None:
        self._process = None
        self._on_answer(b"")


def _batches(paths: Sequence[str]) -> list[list[str]]:
    batches: list[list[str]] = [[]]
    size = 0
    for path in paths:
        size += len(path.encode("utf-8", "surrogateescape")) + 1
        if batches[-1] and size > MOST_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(path)
    return batches
