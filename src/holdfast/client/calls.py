"""What a job handle needs from its way in: one call for each thing that can be done with a job, by its id.

`HttpClient` makes these calls over HTTP, `StoreCalls` on the database. A new verb of a job is one method here, one in
each of them, and one on `Job`.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from holdfast.model import Attempt, Event, Job, Json, TaskRecord
from holdfast.response_types import Explanation


class FileOfJob(Protocol):
    """One artifact."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...


class JobCalls(Protocol):
    async def get(self, job_id: str, *, reconnect: bool = False) -> Job: ...

    async def wait(self, job_id: str, *, timeout: float | None = None) -> Job: ...

    def follow(self, job_id: str, *, after: int = 0) -> AsyncGenerator[Event]: ...

    async def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> tuple[Sequence[Event], int | None]: ...

    async def attempts(self, job_id: str) -> Sequence[Attempt]: ...

    async def tasks(self, job_id: str) -> Sequence[TaskRecord]: ...

    async def explain(self, job_id: str) -> Explanation: ...

    async def cancel(self, job_id: str, *, reason: str | None = None) -> Job: ...

    async def interrupt(self, job_id: str, *, reason: str | None = None) -> Job: ...

    async def resume(
        self,
        job_id: str,
        *,
        reason: str | None = None,
        budget: Mapping[str, float] | None = None,
        stopped: bool = False,
    ) -> Job: ...

    async def resolve(self, job_id: str, result: Json = None, *, reason: str | None = None) -> Job: ...

    async def dismiss(self, job_id: str, *, reason: str | None = None) -> Job: ...

    async def release(self, job_id: str) -> Job: ...

    async def delete(
        self, job_id: str, *, force: bool = False, dry_run: bool = False, reason: str | None = None
    ) -> str: ...

    async def artifacts(self, job_id: str) -> Sequence[FileOfJob]: ...

    async def download(self, job_id: str, path: str, target: Path) -> None: ...


class Accepting(Protocol):
    """How a way in accepts jobs, as plain fields."""

    async def accept(self, job: Mapping[str, Any], *, key: str | None) -> Job: ...

    async def accept_many(self, jobs: Sequence[Mapping[str, Any]], *, key: str | None) -> Sequence[str]: ...
