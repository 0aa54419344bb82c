"""An event loop in its own thread, for synchronous code that makes asynchronous calls, one after the other."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

SHUT_DOWN_SECONDS = 10.0
"""How long a cancelled call, or all calls at the end, may take to finish."""


class LoopThread:
    """Runs calls on its loop while the caller waits. `shut_down` ends it."""

    def __init__(self, name: str) -> None:
        self._over = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Awaitable[T]) -> T:
        begun: list[asyncio.Task[T] | None] = []

        async def whole() -> T:
            begun.append(asyncio.current_task())
            return await work

        waiting = asyncio.run_coroutine_threadsafe(whole(), self._loop)
        try:
            return waiting.result()
        except BaseException:  # For example Ctrl-C: cancel the call and let it end before the next one.
            if not waiting.done():
                waiting.cancel()
                asyncio.run_coroutine_threadsafe(_ended(begun, work), self._loop).result(SHUT_DOWN_SECONDS)
            raise

    def iterate(self, items: AsyncGenerator[T]) -> Iterator[T]:
        """Yield what an asynchronous generator yields; close it with this one."""
        try:
            while (found := self.do(_next(items))) is not None:
                yield found
        finally:
            if not self._over:
                self.do(items.aclose())

    def shut_down(self, close: Callable[[], Awaitable[None]] | None = None) -> None:
        """End the loop as `asyncio.run` does: nothing is pending when it closes, so there are no warnings.

        `close` is called after all calls have ended.
        """
        self._over = True
        if threading.current_thread() is self._thread:
            # The last reference was dropped in the loop's own thread, which cannot wait for itself.
            self._loop.stop()
            return
        try:
            asyncio.run_coroutine_threadsafe(_wind_down(close), self._loop).result(SHUT_DOWN_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _next(items: AsyncGenerator[T]) -> T | None:
    """Return the next item. Runs in the loop, which then knows the generator and closes it at the end."""
    return await anext(items, None)


async def _ended(begun: list[asyncio.Task[T] | None], work: Awaitable[T]) -> None:
    """Wait until a cancelled call has ended; close one that never started."""
    if begun and begun[0] is not None:
        await asyncio.wait([begun[0]])
    elif (close := getattr(work, "close", None)) is not None:
        close()


async def _wind_down(close: Callable[[], Awaitable[None]] | None) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if close is not None:
        await close()
    await asyncio.get_running_loop().shutdown_asyncgens()
