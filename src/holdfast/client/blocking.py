"""`Client`: the calls of `AsyncClient` for synchronous code. They block; the event loop runs in its own thread."""

import functools
import weakref
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from holdfast.client.async_client import AsyncClient
from holdfast.client.http import HttpClient
from holdfast.client.loop_thread import LoopThread
from holdfast.client.sync_submits import SyncSubmits
from holdfast.model import Event

P = ParamSpec("P")
R = TypeVar("R")


def _blocking(
    method: Callable[Concatenate[HttpClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate["Client", P], R]:
    """Return the same call, with the same types, as a blocking one."""

    @functools.wraps(method)
    def call(client: "Client", /, *arguments: P.args, **named: P.kwargs) -> R:
        return client._do(method(client._client, *arguments, **named))

    return call


class Client(SyncSubmits):
    """A client of a server, for synchronous code. Arguments as for `AsyncClient`.

        with Client() as client:
            job = client.submit(Process(["make"]))
            print(job.wait().status)

    Beside `submit`, `submit_many` and `job` it has the calls of the HTTP API, by id.
    """

    def __init__(self, url: str | None = None, **options: Any) -> None:
        thread = LoopThread("holdfast-client")
        try:
            self._client = thread.do(_open(url, options))
        except BaseException:
            thread.shut_down()
            raise
        super().__init__(thread, self._client)
        # Also runs when the program ends, or the last reference is dropped, without a call of `close`.
        self._shut_down = weakref.finalize(self, thread.shut_down, self._client.close)

    get = _blocking(HttpClient.get)
    jobs = _blocking(HttpClient.jobs)
    attempts = _blocking(HttpClient.attempts)
    tasks = _blocking(HttpClient.tasks)
    plan = _blocking(HttpClient.plan)
    explain = _blocking(HttpClient.explain)
    cancel = _blocking(HttpClient.cancel)
    interrupt = _blocking(HttpClient.interrupt)
    resume = _blocking(HttpClient.resume)
    resolve = _blocking(HttpClient.resolve)
    dismiss = _blocking(HttpClient.dismiss)
    release = _blocking(HttpClient.release)
    delete = _blocking(HttpClient.delete)
    upload = _blocking(HttpClient.upload)
    artifacts = _blocking(HttpClient.artifacts)
    download = _blocking(HttpClient.download)
    events = _blocking(HttpClient.events)
    wait = _blocking(HttpClient.wait)
    lanes = _blocking(HttpClient.lanes)
    queues = _blocking(HttpClient.queues)
    workers = _blocking(HttpClient.workers)
    snapshots = _blocking(HttpClient.snapshots)
    tools = _blocking(HttpClient.tools)
    request = _blocking(HttpClient.request)

    def follow(self, job_id: str, *, after: int = 0) -> Iterator[Event]:
        """Yield every event after `after` as it arrives, to the end of the job; a broken stream is resumed."""
        return self._iterate(self._client.follow(job_id, after=after))

    def close(self) -> None:
        """End all calls and close the connections. Idempotent."""
        self._shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _open(url: str | None, options: dict[str, Any]) -> AsyncClient:
    return AsyncClient(url, **options)
