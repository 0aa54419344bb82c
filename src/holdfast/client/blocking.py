"""`Client`: the calls of `AsyncClient` for synchronous code. They block; the event loop runs in its own thread."""

import asyncio
import functools
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from holdfast.client.http import AsyncClient
from holdfast.model import Event

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

SHUT_DOWN_SECONDS = 10.0
"""How long a cancelled call, or all calls at the end, may take to finish."""


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate["Client", P], R]:
    """Return the same call, with the same types, as a blocking one."""

    @functools.wraps(method)
    def call(client: "Client", /, *arguments: P.args, **named: P.kwargs) -> R:
        return client._do(method(client._client, *arguments, **named))

    return call


class Client:
    """A client that makes one call after the other. Arguments as for `AsyncClient`."""

    def __init__(self, url: str | None = None, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._do(_open(url, options))
        except BaseException:
            _shut_down(self._loop, self._thread, None)
            raise
        # Also runs when the program ends, or the last reference is dropped, without a call of `close`.
        self._shut_down = weakref.finalize(self, _shut_down, self._loop, self._thread, self._client)

    submit = _blocking(AsyncClient.submit)
    submit_many = _blocking(AsyncClient.submit_many)
    get = _blocking(AsyncClient.get)
    jobs = _blocking(AsyncClient.jobs)
    attempts = _blocking(AsyncClient.attempts)
    tasks = _blocking(AsyncClient.tasks)
    plan = _blocking(AsyncClient.plan)
    explain = _blocking(AsyncClient.explain)
    cancel = _blocking(AsyncClient.cancel)
    interrupt = _blocking(AsyncClient.interrupt)
    resume = _blocking(AsyncClient.resume)
    resolve = _blocking(AsyncClient.resolve)
    dismiss = _blocking(AsyncClient.dismiss)
    release = _blocking(AsyncClient.release)
    delete = _blocking(AsyncClient.delete)
    upload = _blocking(AsyncClient.upload)
    artifacts = _blocking(AsyncClient.artifacts)
    download = _blocking(AsyncClient.download)
    events = _blocking(AsyncClient.events)
    wait = _blocking(AsyncClient.wait)
    lanes = _blocking(AsyncClient.lanes)
    queues = _blocking(AsyncClient.queues)
    workers = _blocking(AsyncClient.workers)
    snapshots = _blocking(AsyncClient.snapshots)
    tools = _blocking(AsyncClient.tools)
    request = _blocking(AsyncClient.request)

    def follow(self, job_id: str, *, after: int = 0) -> Iterator[Event]:
        """Yield every event after `after` as it arrives, to the end of the job; a broken stream is resumed."""
        events = self._client.follow(job_id, after=after)
        try:
            while (event := self._do(_next(events))) is not None:
                yield event
        finally:
            if self._shut_down.alive:
                self._do(events.aclose())

    def _do(self, work: Awaitable[T]) -> T:
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

    def close(self) -> None:
        """End all calls and close the connections. Idempotent."""
        self._shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _next(events: AsyncGenerator[Event]) -> Event | None:
    """Return the next event. Runs in the loop, which then knows the generator and closes it at the end."""
    return await anext(events, None)


async def _open(url: str | None, options: dict[str, Any]) -> AsyncClient:
    return AsyncClient(url, **options)


async def _ended(begun: list[asyncio.Task[T] | None], work: Awaitable[T]) -> None:
    """Wait until a cancelled call has ended; close one that never started."""
    if begun and begun[0] is not None:
        await asyncio.wait([begun[0]])
    elif (close := getattr(work, "close", None)) is not None:
        close()


def _shut_down(loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: AsyncClient | None) -> None:
    """End the loop as `asyncio.run` does: nothing is pending when it closes, so there are no warnings."""
    if (
        threading.current_thread() is thread
    ):  # The last reference was dropped in the loop's own thread, which cannot wait for itself.
        loop.stop()
        return
    try:
        asyncio.run_coroutine_threadsafe(_wind_down(client), loop).result(SHUT_DOWN_SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _wind_down(client: AsyncClient | None) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if client is not None:
        await client.close()
    await asyncio.get_running_loop().shutdown_asyncgens()
