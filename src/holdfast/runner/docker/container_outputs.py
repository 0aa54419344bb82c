"""Collects what a container left in its work folder, by archive. Two cheap calls find out whether there is anything."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from holdfast.runner.collected_outputs import CollectedOutputs
from holdfast.runner.docker.container_config import UNTOUCHED, WORK
from holdfast.runner.docker.engine import Engine, EngineError, NoSuchObject
from holdfast.runner.output_sources import collect_tar, read_in_thread


class ContainerOutputs:
    """The outputs of one ended container. `verify` raises unless the engine is the one that the container ran on."""

    def __init__(self, engine: Engine, container: str, verify: Callable[[], Awaitable[None]]) -> None:
        self._engine = engine
        self._container = container
        self._verify = verify

    async def collect(self, collected: CollectedOutputs) -> None:
        # Where nothing was created in the work folder, there is no result.json.
        anything, output = await asyncio.gather(self._changed(WORK), self._changed(f"{WORK}/output"))
        if anything and await self._changed(f"{WORK}/result.json"):
            await self._collect("result.json", collected)
        if output:
            await self._collect("output", collected)

    async def _changed(self, path: str) -> bool:
        """Return whether the attempt left something there: an unused folder keeps the time that we gave it."""
        try:
            return await self._engine.changed_at(self._container, path) != UNTOUCHED
        except NoSuchObject:
            await self._verify()
            return False
        except EngineError:
            return True  # Fetching it will show why.

    async def _collect(self, name: str, collected: CollectedOutputs) -> None:
        await read_in_thread(self._entry(name), lambda tar: collect_tar(tar, collected))

    async def _entry(self, name: str) -> AsyncIterator[bytes]:
        """Yield one entry of the work folder as a tar stream; nothing if it does not exist."""
        with contextlib.suppress(NoSuchObject):
            async with contextlib.aclosing(self._engine.get(self._container, f"{WORK}/{name}")) as tar:
                async for chunk in tar:
                    yield chunk
