"""`SyncJob`: the calls of `Job` for synchronous code. They block."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from holdfast.client.job import Job
from holdfast.model import Error, Event, Json, Status
from holdfast.model import Job as JobRecord

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
S = TypeVar("S", bound="SyncJob[Any]")


class Blocking(Protocol):
    """What runs asynchronous calls for synchronous code."""

    def _do(self, work: Awaitable[T]) -> T: ...

    def _iterate(self, items: AsyncGenerator[T]) -> Iterator[T]: ...


def _blocking(
    method: Callable[Concatenate[Job[Any], P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SyncJob[Any]", P], T]:
    """Return the same call, with the same types, as a blocking one."""

    def call(job: "SyncJob[Any]", /, *arguments: P.args, **named: P.kwargs) -> T:
        return job._owner._do(method(job._job, *arguments, **named))

    return _documented(call, method)


def _moving(
    method: Callable[Concatenate[Job[Any], P], Coroutine[Any, Any, Job[Any]]],
) -> Callable[Concatenate[S, P], S]:
    """Return the same call as a blocking one; it returns this handle."""

    def call(job: S, /, *arguments: P.args, **named: P.kwargs) -> S:
        job._owner._do(method(job._job, *arguments, **named))
        return job

    return _documented(call, method)


def _documented(call: T, method: Any) -> T:
    for name in ("__name__", "__qualname__", "__doc__", "__wrapped__"):
        setattr(call, name, method if name == "__wrapped__" else getattr(method, name))
    return call


class SyncJob(Generic[R]):
    """A submitted job, for synchronous code. The calls of `Job`, which block; the same properties.

        with app.sync() as jobs:
            job = jobs.submit(play, target="crm", steps=["open"])
            for event in job.follow():
                print(event.type, event.data)
            report = job.result(timeout=60)

    Handles are equal if their ids are.
    """

    def __init__(self, owner: Blocking, job: Job[R]) -> None:
        self._owner = owner
        self._job = job

    def __repr__(self) -> str:
        return repr(self._job).replace("Job", "SyncJob", 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SyncJob) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def id(self) -> str:
        """Its id."""
        return self._job.id

    @property
    def record(self) -> JobRecord:
        """The whole job as it was last read."""
        return self._job.record

    @property
    def status(self) -> Status:
        """Its status as it was last read."""
        return self._job.status

    @property
    def error(self) -> Error | None:
        """Why it did not succeed; None if nothing went wrong."""
        return self._job.error

    @property
    def exit_code(self) -> int | None:
        """The exit code of its process or container, if it has ended."""
        return self._job.exit_code

    @property
    def progress(self) -> Json:
        """What it last reported as progress."""
        return self._job.progress

    @property
    def usage(self) -> Mapping[str, float]:
        """What it used, summed over its attempts."""
        return self._job.usage

    @property
    def queue(self) -> str:
        """The queue that it waits in."""
        return self._job.queue

    @property
    def lane(self) -> str | None:
        """Its lane, if it has one."""
        return self._job.lane

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        return self._job.labels

    @property
    def reused(self) -> bool:
        """Whether the submit found this job instead of making one."""
        return self._job.reused

    def result(self, *, timeout: float | None = None) -> R:
        """Wait for the result. Raise JobFailed, JobTimedOut, JobCancelled or JobPaused if there is none."""
        return self._owner._do(self._job.result(timeout=timeout))

    def follow(self, *, after: int = 0) -> Iterator[Event]:
        """Yield every event after `after` as it arrives, to the end of the job."""
        return self._owner._iterate(self._job.follow(after=after))

    refresh = _moving(Job.refresh)
    wait = _moving(Job.wait)
    cancel = _moving(Job.cancel)
    interrupt = _moving(Job.interrupt)
    resume = _moving(Job.resume)
    resolve = _moving(Job.resolve)
    dismiss = _moving(Job.dismiss)
    release = _moving(Job.release)
    events = _blocking(Job.events)
    logs = _blocking(Job.logs)
    attempts = _blocking(Job.attempts)
    tasks = _blocking(Job.tasks)
    artifacts = _blocking(Job.artifacts)
    download = _blocking(Job.download)
    read = _blocking(Job.read)
    explain = _blocking(Job.explain)
    delete = _blocking(Job.delete)
