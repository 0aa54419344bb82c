"""`Job`: the handle of one job, the same for a program on the database and for one over HTTP."""

import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

from holdfast import errors
from holdfast.client.calls import FileOfJob, JobCalls
from holdfast.model import Attempt, Error, Event, Json, Status, TaskRecord
from holdfast.model import Job as JobRecord
from holdfast.response_types import Explanation

R = TypeVar("R")
_ENDS = {
    Status.FAILED: errors.JobFailed,
    Status.TIMED_OUT: errors.JobTimedOut,
    Status.CANCELLED: errors.JobCancelled,
    Status.PAUSED: errors.JobPaused,
}


class Job(Generic[R]):
    """A submitted job. `R` is the type of its result.

    `record` is the job as it was last read: by the submit, by `refresh`, `wait` and `result`, and by every call that
    moves the job. The properties read it.

        job = await app.submit(play, target="crm", steps=["open"])
        async for event in job.follow():
            print(event.type, event.data)
        report = await job.result(timeout=60)
    """

    def __init__(
        self,
        calls: JobCalls,
        job_id: str,
        *,
        record: JobRecord | None = None,
        decode: Callable[[Any], Any] | None = None,
    ) -> None:
        self.id = job_id
        self._calls = calls
        self._record = record
        self._decode = decode

    def __repr__(self) -> str:
        return f"<Job {self.id}>" if self._record is None else f"<Job {self.id} {self._record.status}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    # As it was last read

    @property
    def record(self) -> JobRecord:
        """The whole job as it was last read. After `submit_many` and `app.job(id)`, read it with `refresh` first."""
        if self._record is None:
            raise errors.Invalid("job", f"{self.id} was not read yet: call refresh, wait or result first")
        return self._record

    @property
    def status(self) -> Status:
        """Its status as it was last read."""
        return self.record.status

    @property
    def error(self) -> Error | None:
        """Why it did not succeed; None if nothing went wrong."""
        return self.record.error

    @property
    def exit_code(self) -> int | None:
        """The exit code of its process or container, if it has ended."""
        return self.record.exit_code

    @property
    def progress(self) -> Json:
        """What it last reported as progress."""
        return self.record.progress

    @property
    def usage(self) -> Mapping[str, float]:
        """What it used, summed over its attempts."""
        return self.record.usage

    @property
    def queue(self) -> str:
        """The queue that it waits in."""
        return self.record.queue

    @property
    def lane(self) -> str | None:
        """Its lane, if it has one."""
        return self.record.lane

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        return self.record.labels

    @property
    def reused(self) -> bool:
        """Whether the submit found this job instead of making one."""
        return self.record.reused

    async def refresh(self) -> Self:
        """Read the job again."""
        return self._read(await self._calls.get(self.id))

    # Waiting

    async def wait(self, *, timeout: float | None = None) -> Self:
        """Wait until the job has ended or needs a person (`paused`). Raise TimeoutError after `timeout` seconds."""
        return self._read(await self._calls.wait(self.id, timeout=timeout))

    async def result(self, *, timeout: float | None = None) -> R:
        """Wait for the result. Raise JobFailed, JobTimedOut, JobCancelled or JobPaused if there is none.

        The result of a function has the type that its annotation says.
        """
        await self.wait(timeout=timeout)
        record = self.record
        if record.status is not Status.SUCCEEDED:
            why = "it ended without a reason" if record.error is None else record.error.message
            code = None if record.error is None else record.error.code
            raise _ENDS[record.status](self.id, record.status, code, why)
        found: R = record.result if self._decode is None else self._decode(record.result)
        return found

    def follow(self, *, after: int = 0) -> AsyncGenerator[Event]:
        """Yield every event after `after` as it arrives, to the end of the job. It survives minutes of outage."""
        return self._calls.follow(self.id, after=after)

    # Its history and files

    async def events(self, *, after: int = 0, limit: int = 1000) -> tuple[Sequence[Event], int | None]:
        """Return one page of the history, and where the next begins."""
        return await self._calls.events(self.id, after=after, limit=limit)

    async def logs(self, *, stream: str | None = None) -> list[str]:
        """Return the lines logged so far; `stream` is `stdout` or `stderr`, both if it is left out."""
        lines: list[str] = []
        after: int | None = 0
        while after is not None:
            items, after = await self.events(after=after)
            for event in items:
                if event.type == "log" and stream in (None, event.data.get("stream")):
                    lines += event.data["lines"]
        return lines

    async def attempts(self) -> Sequence[Attempt]:
        """Return every attempt, the open one last."""
        return await self._calls.attempts(self.id)

    async def tasks(self) -> Sequence[TaskRecord]:
        """Return the tasks of a pipeline, in order."""
        return await self._calls.tasks(self.id)

    async def artifacts(self) -> Sequence[FileOfJob]:
        """Return path and size of the files that the last ended attempt left."""
        return await self._calls.artifacts(self.id)

    async def download(self, path: str, target: str | PathLike[str]) -> None:
        """Save one artifact; an existing target is replaced once the download is complete."""
        await self._calls.download(self.id, path, Path(target))

    async def read(self, path: str) -> bytes:
        """Return the content of one artifact."""
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            file = Path(folder) / "artifact"
            await self._calls.download(self.id, path, file)
            return file.read_bytes()

    async def explain(self) -> Explanation:
        """Return why the job is not running, in words."""
        return await self._calls.explain(self.id)

    # What can be done with it

    async def cancel(self, *, reason: str | None = None) -> Self:
        """End it as `cancelled`. A running job is stopped by its worker: wait for that with `wait`."""
        return self._read(await self._calls.cancel(self.id, reason=reason))

    async def interrupt(self, *, reason: str | None = None) -> Self:
        """Stop a running job so that it ends `paused`; a waiting one is cancelled."""
        return self._read(await self._calls.interrupt(self.id, reason=reason))

    async def resume(
        self,
        *,
        reason: str | None = None,
        budget: Mapping[str, float] | None = None,
        stopped: bool = False,
    ) -> Self:
        """Queue it again if it paused, failed, timed out or was cancelled. `budget` raises its limits.

        `stopped` says that a person made sure that a lost attempt no longer runs.
        """
        return self._read(await self._calls.resume(self.id, reason=reason, budget=budget, stopped=stopped))

    async def resolve(self, result: Json = None, *, reason: str | None = None) -> Self:
        """Mark it as succeeded with this result, if it paused, failed or timed out."""
        return self._read(await self._calls.resolve(self.id, result, reason=reason))

    async def dismiss(self, *, reason: str | None = None) -> Self:
        """Let its lane continue without it, if it failed or timed out."""
        return self._read(await self._calls.dismiss(self.id, reason=reason))

    async def release(self) -> Self:
        """Queue it, if it was submitted with `hold`."""
        return self._read(await self._calls.release(self.id))

    async def delete(self, *, force: bool = False, dry_run: bool = False, reason: str | None = None) -> str:
        """Delete it; return `deleted`, `deleting` or `would_delete`. With `force`, stop it first."""
        return await self._calls.delete(self.id, force=force, dry_run=dry_run, reason=reason)

    def _read(self, record: JobRecord) -> Self:
        """Store what a call returned; whether the submit found or made the job stays."""
        reused = self._record is not None and self._record.reused
        self._record = msgspec.structs.replace(record, reused=reused)
        return self
