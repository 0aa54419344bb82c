"""A worker inside a program: for tests, and for small programs that need no process of their own for it."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from holdfast import registry
from holdfast.client.loop_thread import LoopThread
from holdfast.errors import Invalid
from holdfast.submission import QUEUE

if TYPE_CHECKING:
    from holdfast.client.app import Holdfast

SLOTS = 4
ASSEMBLE = "holdfast.assemble"
"""What builds a worker. It is imported when one starts: a program that only submits does without it."""


class EmbeddedWorker:
    """A worker of an application, running while the block lasts. Then it drains, as on SIGTERM.

    `async with` runs it as a task of this event loop: functions that block the loop delay each other. `with` gives it
    a loop in its own thread.
    """

    def __init__(self, app: "Holdfast", *, queues: Mapping[str, int] | None, data_dir: Path | None) -> None:
        named = {str(function.defaults.get("queue", QUEUE)) for function in app.functions.all} | {QUEUE}
        self.queues = dict.fromkeys(sorted(named), SLOTS) if queues is None else dict(queues)
        if not self.queues or any(slots < 1 for slots in self.queues.values()):
            raise Invalid("queues", f"{self.queues} names no queue, or one without slots")
        self._app = app
        self._settings = app.settings if data_dir is None else replace(app.settings, data_dir=data_dir)
        self._stack = AsyncExitStack()
        self._thread: LoopThread | None = None
        self._worker: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """The worker's id, as `holdfast workers` shows it."""
        return "" if self._worker is None else str(self._worker.id)

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def __enter__(self) -> Self:
        self._thread = LoopThread("holdfast-worker")
        try:
            self._thread.do(self._start())
        except BaseException:
            self._thread.shut_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        try:
            self._thread.do(self._stop())
        finally:
            self._thread.shut_down()

    async def _start(self) -> None:
        """Start the worker and wait until it claims; raise its error if it cannot start."""
        build = registry.attribute(f"{ASSEMBLE}:worker_of")
        store = await self._store_with_clock()
        try:
            self._worker = await self._stack.enter_async_context(
                build(self._settings, queues=self.queues, functions=self._app.functions, store=store)
            )
            # Reason for a bare task: it lives as long as the block, which `_stop` ends.
            self._task = asyncio.create_task(self._worker.run())
            started = asyncio.ensure_future(self._worker.started.wait())
            await asyncio.wait([self._task, started], return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                started.cancel()
                await self._task
        except BaseException:
            await self._stack.aclose()
            raise

    async def _store_with_clock(self) -> Any:
        """Open a store with the clock of a test; without one, the worker opens its own."""
        if self._app.clock is None:
            return None
        store = await self._app.open_store()
        self._stack.push_async_callback(store.close)
        await registry.attribute(f"{ASSEMBLE}:attach_job_files")(store, self._settings)
        return store

    async def _stop(self) -> None:
        """Drain the worker; raise the error that ended it before, if there was one."""
        try:
            if self._task is not None:
                if not self._task.done():
                    self._worker.drain()
                await self._task
        finally:
            await self._stack.aclose()
