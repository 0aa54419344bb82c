"""Files that change between two attempts of a pipeline: planned again, in one transaction, also over crashes."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from holdfast.model import Job, Status
from tests.support.crashing_worker import Hook
from tests.support.pipelines import Pipelines, adds, task
from tests.support.service import Service, service_in_process
from tests.support.up_process import PROGRAM
from tests.support.worker_processes import WorkerProcesses

SLOW: dict[str, Any] = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}


async def cli(service: Service, *arguments: str) -> str:
    environment = {**os.environ, "HOLDFAST_URL": service.url, "HOLDFAST_TOKEN": service.admin}
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, *arguments, env=environment, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, arguments
    return said.decode()


async def tasks_of(service: Service, job: Job) -> list[tuple[str, str]]:
    """What the service says of a job's tasks."""
    async with service.client() as client:
        items = (await client.get(f"/v1/jobs/{job.id}/tasks")).json()["items"]
    return [(item["status"], item["snapshot"]) for item in items]


async def plans(processes: WorkerProcesses, job: Job) -> list[tuple[str, bool]]:
    """The plans in a job's history, and whether each took the place of another."""
    events = [event.data for event in await processes.events(job, "task") if "plan" in event.data]
    return [(data["plan"], data.get("replanned", False)) for data in events]


async def test_changed_file_is_planned_again_whole_or_not_at_all(processes: WorkerProcesses, tmp_path: Path) -> None:
    """Proves P9: one worker dies between the old tasks and the new ones, the next one just after them."""
    pipelines = Pipelines(processes, tmp_path)
    source = pipelines.inputs / "script"
    source.write_text("exit 7")
    runs = task("two", '. "$HOLDFAST_INPUTS/script"', files=["script"])
    asked = {
        "runner": "process",
        "spec": {"env": {"MARKER": str(pipelines.marker)}},
        "tasks": [adds("one"), runs, adds("three")],
    }
    async with service_in_process(processes.settings.database_url or "", processes.settings.data_dir) as service:
        file = tmp_path / "pipeline.json"
        file.write_text(json.dumps(asked))
        job = await processes.get((await cli(service, "submit", "--file", str(file))).strip())
        first = processes.start({"default": 1}, **SLOW)
        await processes.ended(job, Status.FAILED)
        first.kill()
        before = await tasks_of(service, job)
        assert [status for status, _ in before] == ["succeeded", "failed", "pending"]

        source.write_text("echo two >> made")
        await cli(service, "resume", job.id)
        inside = processes.start({"default": 1}, Hook(step="statement insert_tasks", do="kill"), **SLOW)
        assert await inside.dead() == -signal.SIGKILL, inside.log
        assert await tasks_of(service, job) == before, "the plan that was there, with nothing missing"
        assert await plans(processes, job) == [(before[-1][1], False)]

        second = processes.start({"default": 1}, Hook(step="recorded", do="kill", job=job.id), **SLOW)
        assert await second.dead() == -signal.SIGKILL, second.log
        after = await tasks_of(service, job)
        assert [status for status, _ in after] == ["succeeded", "pending", "pending"]
        assert [old[1] == new[1] for old, new in zip(before, after, strict=True)] == [True, False, False]

        processes.start({"default": 1}, **SLOW)
        await processes.ended(job, Status.SUCCEEDED)
        assert await tasks_of(service, job) == [("succeeded", snapshot) for _, snapshot in after]
        assert await plans(processes, job) == [(before[-1][1], False), (after[-1][1], True)]
        assert (await cli(service, "show", job.id)).count("succeeded") == 4
    assert pipelines.ran() == ["one", "two", "two", "three"]
    assert await pipelines.content("three") == "one\ntwo\nthree\n"
    assert await pipelines.kept() == ["one", "three", "two"]
    await processes.assert_true(job)
