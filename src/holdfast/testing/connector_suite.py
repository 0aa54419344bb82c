"""What a connector guarantees, as tests: pipelines on a real worker, with a database and folders of their own."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.assemble import worker_of
from holdfast.config import Settings
from holdfast.errors import Invalid
from holdfast.model import Job, Status, TaskRecord
from holdfast.pipeline.connectors import connector_of
from holdfast.pipeline.sources import inputs_of
from holdfast.registry import connector_named
from holdfast.runner.workspace import WorkspacePaths
from holdfast.runner_specs import check_spec
from holdfast.store import Store
from holdfast.store.migrate import migrate
from holdfast.store.store import connect

PATIENCE = 150.0
FAILS = {"name": "fails", "command": ["false"]}


class ConnectorSuite:
    """What a connector guarantees. Set `name` and define `task`; override `settings` if the connector needs any."""

    name: str

    def task(self, n: int, sources: Path) -> Mapping[str, Any]:
        """Return the nth task, from 1, without its name: it fails unless the tasks 1 to n-1 ran in this workspace.

        Files that it names are written below `sources`.
        """
        raise NotImplementedError

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        """The settings of the worker. As root, tasks run as root: other users cannot reach pytest's folders."""
        return Settings(
            data_dir=tmp_path / "data", process_user="root" if os.geteuid() == 0 else None, docker_host=None
        )

    @pytest.fixture
    async def store(self, settings: Settings) -> AsyncIterator[Store]:
        """The store of a worker that runs during the test."""
        settings.data_dir.mkdir(mode=0o711)
        database = await connect(settings.url)
        await migrate(database)
        async with Store(database) as store, worker_of(settings, queues={"default": 1}, store=store) as worker:
            running = asyncio.create_task(worker.run())
            try:
                yield store
            finally:
                worker.drain()
                await running

    async def ran(self, store: Store, settings: Settings, *numbers: int, then: Sequence[Any] = ()) -> Job:
        """Run the tasks with these numbers, and then others, as one pipeline."""
        sources = inputs_of(settings.shared, "default")
        sources.mkdir(parents=True, exist_ok=True)
        tasks = [{"name": f"task {n}", **self.task(n, sources)} for n in numbers]
        job = await store.jobs.submit(
            {"runner": "process", "connector": self.name, "tasks": [*tasks, *then], "spec": {}}
        )
        deadline = time.monotonic() + PATIENCE
        while not job.status.terminal:
            assert time.monotonic() < deadline, f"the pipeline never ended: {job.status}"
            await asyncio.sleep(0.05)
            job = await store.jobs.get(job.id)
        return job

    async def states(self, store: Store, job: Job) -> list[str]:
        tasks: Sequence[TaskRecord] = await store.tasks.list(job.id)
        return ["cached" if task.cached else str(task.status) for task in tasks]

    def test_the_descriptor_fits_the_connector(self, tmp_path: Path) -> None:
        connector, descriptor = connector_of(self.name), connector_named(self.name)
        assert connector.engine() == connector.engine(), "the version of the server is part of every identity"
        paths = WorkspacePaths(tree=str(tmp_path), inputs=str(tmp_path), socket=str(tmp_path / "s"), root=False)
        assert (connector.service(paths) is not None) is connector.serves
        pipeline = {"connector": self.name, "tasks": [{"name": "one", "sql": "one.sql"}]}
        if descriptor.sql:
            check_spec("process", pipeline)
        else:
            with pytest.raises(Invalid, match="SQL"):
                check_spec("process", pipeline)

    async def test_each_task_continues_the_workspace_of_the_last_one(self, store: Store, settings: Settings) -> None:
        """Proves P1."""
        job = await self.ran(store, settings, 1, 2, 3)
        assert job.status is Status.SUCCEEDED, job.error
        assert await self.states(store, job) == ["succeeded"] * 3

    async def test_a_repeat_runs_nothing(self, store: Store, settings: Settings) -> None:
        first, again = await self.ran(store, settings, 1, 2), await self.ran(store, settings, 1, 2)
        assert (first.status, again.status) == (Status.SUCCEEDED, Status.SUCCEEDED), (first.error, again.error)
        assert await self.states(store, again) == ["cached", "cached"]

    async def test_another_pipeline_continues_from_a_snapshot(self, store: Store, settings: Settings) -> None:
        """The copy of a quiet workspace is a whole one: what the earlier tasks left is there."""
        await self.ran(store, settings, 1, 2)
        job = await self.ran(store, settings, 1, 2, 3)
        assert job.status is Status.SUCCEEDED, job.error
        assert await self.states(store, job) == ["cached", "cached", "succeeded"]

    async def test_what_ran_before_a_failed_task_is_kept(self, store: Store, settings: Settings) -> None:
        job = await self.ran(store, settings, 1, then=[FAILS])
        assert job.status is Status.FAILED
        assert await self.states(store, job) == ["succeeded", "failed"]
        job = await self.ran(store, settings, 1, 2)
        assert job.status is Status.SUCCEEDED, job.error
        assert await self.states(store, job) == ["cached", "succeeded"]
