"""`submit` and `submit_many` for synchronous code. They block."""

from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from holdfast.client.builders import Builder, Call
from holdfast.client.functions import Function
from holdfast.client.loop_thread import LoopThread
from holdfast.client.submits import Submits, Submittable
from holdfast.client.sync_job import SyncJob

R = TypeVar("R")
T = TypeVar("T")


class SyncSubmits:
    """The calls of `Submits`, through a loop in its own thread."""

    def __init__(self, thread: LoopThread, submits: Submits) -> None:
        self._thread = thread
        self._submits = submits

    @overload
    def submit(self, job: Function[..., Any, R], /, **inputs: Any) -> SyncJob[R]: ...
    @overload
    def submit(self, job: Call[R], /) -> SyncJob[R]: ...
    @overload
    def submit(self, job: Builder | Mapping[str, Any], /, *, key: str | None = None) -> SyncJob[Any]: ...
    @overload
    def submit(self, job: str, /, **inputs: Any) -> SyncJob[Any]: ...

    def submit(self, job: Any, /, **inputs: Any) -> SyncJob[Any]:
        """Submit one job; when this returns, it is in the database. As `Holdfast.submit`."""
        return SyncJob(self, self._do(self._submits.submit(job, **inputs)))

    def submit_many(self, jobs: Sequence[Submittable], /, *, key: str | None = None) -> list[SyncJob[Any]]:
        """Submit many jobs, all or none; return their handles in order. As `Holdfast.submit_many`."""
        return [SyncJob(self, job) for job in self._do(self._submits.submit_many(jobs, key=key))]

    def job(self, job_id: str) -> SyncJob[Any]:
        """Return the handle of a job that exists, without reading it."""
        return SyncJob(self, self._submits.job(job_id))

    def _do(self, work: Awaitable[T]) -> T:
        return self._thread.do(work)

    def _iterate(self, items: AsyncGenerator[T]) -> Iterator[T]:
        """Yield what an asynchronous generator yields. It keeps this object, and with it the loop, alive."""
        yield from self._thread.iterate(items)
