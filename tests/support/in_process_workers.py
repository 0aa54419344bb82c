"""Workers on a real store, in the test's own process."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from holdfast.assemble import folder_artifacts, worker_of
from holdfast.config import Settings
from holdfast.model import Event, Job, Status
from holdfast.runner.artifacts import MakeArtifacts
from holdfast.runner.function import FunctionRegistry
from holdfast.runner.state_folder import StateFolder
from holdfast.store import Store
from holdfast.worker.execution_services import StepHook
from holdfast.worker.worker import Worker

T = TypeVar("T")
PATIENCE = 150.0
"""Seconds: a start that comes too late is tried again after up to 30 s, and a loaded machine is late several times."""


async def eventually(look: Callable[[], Awaitable[T | None]], what: str = "") -> T:
    """Return the first true answer of something that has to become true."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if answer := await look():
            return answer
        await asyncio.sleep(0.01)  # Reason: the look is the signal; this only spaces the questions.
    raise AssertionError(f"never came true: {what}")


class InProcessWorkers:
    """Settings with short times, a store, functions, and workers on them."""

    def __init__(self, url: str, folder: Path, store: Store) -> None:
        self.settings = Settings(
            database_url=url,
            data_dir=folder,
            process_user="root",
            docker_host=None,
            lease_ttl=6.0,
            heartbeat_interval=1.0,
            reaper_interval=1.0,
            poll_interval=0.2,
            drain_grace=2.0,
        )
        self.store = store
        self.functions = FunctionRegistry()

    def set(self, **settings: Any) -> None:
        self.settings = replace(self.settings, **settings)

    @asynccontextmanager
    async def worker(
        self,
        queues: Mapping[str, int] | None = None,
        *,
        at: StepHook | None = None,
        state: StateFolder | None = None,
        worker_id: str | None = None,
        artifacts: MakeArtifacts = folder_artifacts,
    ) -> AsyncIterator[Worker]:
        """Run a worker while the block lasts; then it leaves."""
        async with worker_of(
            self.settings,
            queues=queues or {"default": 8},
            functions=self.functions,
            at=at,
            state=state,
            worker_id=worker_id,
            artifacts=artifacts,
        ) as worker:
            task = asyncio.create_task(worker.run())
            try:
                yield worker
            finally:
                if not task.done():
                    worker.drain()
                await task

    async def submit(self, function: str | None = None, /, **fields: Any) -> Job:
        if function is not None:
            fields |= {"runner": "function", "spec": {"name": function}}
        return await self.store.jobs.submit(fields)

    async def sh(self, script: str, /, env: Mapping[str, str] | None = None, **fields: Any) -> Job:
        """Submit a shell script as a process."""
        return await self.command("sh", "-c", script, env=env, **fields)

    async def command(self, *command: str, env: Mapping[str, str] | None = None, **fields: Any) -> Job:
        spec: dict[str, Any] = {"command": list(command), **fields.pop("spec", {})}
        if env:
            spec["env"] = dict(env)
        return await self.store.jobs.submit({"runner": "process", "spec": spec, **fields})

    async def container(self, script: str, /, env: Mapping[str, str] | None = None, **fields: Any) -> Job:
        """Submit a shell script as a container of the tests' image; `spec` adds to what it asks for."""
        spec: dict[str, Any] = {"image": "holdfast-test:1", "command": ["sh", "-c", script], **fields.pop("spec", {})}
        if env:
            spec["env"] = dict(env)
        return await self.store.jobs.submit({"runner": "docker", "spec": spec, **fields})

    async def get(self, job: Job | str) -> Job:
        return await self.store.jobs.get(job if isinstance(job, str) else job.id)

    async def ended(self, job: Job | str, *statuses: Status) -> Job:
        """Wait until a job has ended (or paused), as one of these statuses if they are given."""

        async def look() -> Job | None:
            found = await self.get(job)
            return found if found.status.terminal or found.status is Status.PAUSED else None

        found = await eventually(look, f"job {job if isinstance(job, str) else job.id} ends")
        assert not statuses or found.status in statuses, (found.status, found.error)
        return found

    async def running(self, job: Job | str) -> Job:
        """Wait until an attempt of a job has started."""

        async def look() -> Job | None:
            found = await self.get(job)
            return found if found.status is Status.RUNNING and found.attempts > 0 else None

        return await eventually(look, "the job starts")

    async def events(self, job: Job | str, type: str | None = None) -> Sequence[Event]:
        items = (await self.store.events.page(job if isinstance(job, str) else job.id)).items
        return [event for event in items if type is None or event.type == type]

    async def log(self, job: Job | str, stream: str = "stdout") -> list[str]:
        """The lines of one stream, in order."""
        events = await self.events(job, "log")
        return [line for event in events if event.data["stream"] == stream for line in event.data["lines"]]

    async def wait_for_log(self, job: Job | str, line: str, stream: str = "stdout") -> None:
        """Wait until a line is in the job's log."""

        async def look() -> bool:
            return line in await self.log(job, stream)

        await eventually(look, f"the log has {line!r}")

    @property
    def folders(self) -> list[Path]:
        """The attempt folders that are there."""
        return sorted(self.settings.state.glob("attempts/*/*"))
