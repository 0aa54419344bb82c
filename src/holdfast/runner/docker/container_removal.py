"""Removes ended containers in the background: few at a time, and after the starts that are under way.

A removal competes with starts for the engine, and nobody waits for it. The backlog is bounded: removals no longer give
way once there are several, and a worker claims nothing more while too many of its attempts are still being cleaned up.
What a crash or an unreachable engine leaves is removed by the sweep.
"""

import asyncio
import contextlib
import time

from holdfast.runner.docker.engine import Engine

AT_ONCE = 2
"""Concurrent removals."""
GIVE_WAY = 8
"""Removals that may wait for starts; with more, none waits."""
LONGEST = 2.0
"""Seconds that a removal may wait for starts."""


class ContainerRemover:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._starts = 0
        self._changed = asyncio.Event()
        self.waiting = 0
        """Containers that are still to be removed."""

    def start_begins(self) -> None:
        self._starts += 1

    def start_ended(self) -> None:
        self._starts -= 1
        self._wake()

    async def remove(self, container: str) -> None:
        """Remove a stopped container and its volume. Raises what the engine answers."""
        latest = time.monotonic() + LONGEST
        self.waiting += 1
        self._wake()
        try:
            await self._after_starts(latest)
            async with self._slots:
                await self._engine.remove(container)
        finally:
            self.waiting -= 1

    async def _after_starts(self, latest: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, latest - time.monotonic())):
                while self._starts and self.waiting <= GIVE_WAY:
                    await self._changed.wait()

    def _wake(self) -> None:
        """Let waiting removals check again."""
        self._changed.set()
        self._changed = asyncio.Event()
