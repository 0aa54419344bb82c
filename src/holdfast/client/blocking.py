"""`Client`: the calls of `AsyncClient` for code that is not async. They block; its loop runs in a thread of its own."""

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from holdfast.client.http import AsyncClient
from holdfast.model import Event

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate["Client", P], R]:
    """The same call, with the same types, that waits for its answer."""

    @functools.wraps(method)
    def call(client: "Client", /, *arguments: P.args, **named: P.kwargs) -> R:
        return client._do(method(client._client, *arguments, **named))

    return call


class Client:
    """Talks to a server, one call after the other. Arguments as for `AsyncClient`."""

    def __init__(self, url: str | None = None, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._do(_open(url, options))
        except BaseException:
            self._stop()
            raise

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
        """Every event behind `after`, as it comes, to the end of the job; a broken stream is taken up again."""
        events = self._client.follow(job_id, after=after)
        try:
            while (event := self._do(anext(events, None))) is not None:
                yield event
        finally:
            if not self._loop.is_closed():
                self._do(events.aclose())

    def _do(self, work: Awaitable[T]) -> T:
        async def whole() -> T:
            return await work

        waiting = asyncio.run_coroutine_threadsafe(whole(), self._loop)
        try:
            return waiting.result()
        except BaseException:  # Ctrl-C, say: what nobody waits for any more is to end.
            waiting.cancel()
            raise

    def close(self) -> None:
        self._do(self._client.close())
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _open(url: str | None, options: dict[str, Any]) -> AsyncClient:
    return AsyncClient(url, **options)
