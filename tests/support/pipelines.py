"""Pipelines for tests: shell scripts as tasks that note each run in a file, and what became of them."""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.model import Job, Snapshot, TaskRecord
from holdfast.pipeline.sources import inputs_of
from holdfast.runner.folder_artifacts import FolderArtifacts
from tests.support.in_process_workers import InProcessWorkers

RESULT = """printf '{"version": 1, "result": {"by": "%s"}}' NAME > "$HOLDFAST_WORK_DIR/result.json"; """


def task(name: str, script: str, **fields: Any) -> dict[str, Any]:
    """A task that notes its run, and then does what it is for."""
    return {"name": name, "command": ["sh", "-ec", f'echo {name} >> "$MARKER"; {script}'], **fields}


def adds(name: str, **fields: Any) -> dict[str, Any]:
    """A task that adds a line of its own to a file of the workspace, and says what is in it then."""
    return task(name, f"echo {name} >> made; cat made", **fields)


def leaves(name: str, *files: str, result: bool = True, then: str = "", **fields: Any) -> dict[str, Any]:
    """A task that leaves files with its name in them, and perhaps a result."""
    script = 'cd "$HOLDFAST_WORK_DIR/output"; '
    for file in files:
        script += f'mkdir -p "$(dirname {file})"; echo {name} > {file}; '
    script += RESULT.replace("NAME", name) if result else ""
    return task(name, script + 'cd "$HOLDFAST_WORKSPACE"; ' + then, **fields)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user gets to. Those of pytest are closed again by each run that begins beside this one."""
    folder = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Pipelines:
    """Submits pipelines on a workers. The marker's path is no secret to the cache, so it is the same for all."""

    def __init__(self, workers: InProcessWorkers, folder: Path) -> None:
        self.workers = workers
        self.marker = folder / "marker"
        self.inputs = inputs_of(workers.settings.shared, "default")
        self.inputs.mkdir(parents=True)

    async def submit(self, *tasks: Mapping[str, Any], **fields: Any) -> Job:
        spec = {"env": {"MARKER": str(self.marker)}, **fields.pop("spec", {})}
        asked = {"runner": "process", "spec": spec, "tasks": list(tasks), **fields}
        return await self.workers.store.jobs.submit(asked)

    def ran(self) -> list[str]:
        """The names of all tasks that ran, in order."""
        return self.marker.read_text().split() if self.marker.exists() else []

    async def tasks(self, job: Job) -> Sequence[TaskRecord]:
        return await self.workers.store.tasks.list(job.id)

    async def statuses(self, job: Job) -> list[str]:
        """How each task stands, in one word."""
        return ["cached" if task.cached else str(task.status) for task in await self.tasks(job)]

    async def snapshots(self) -> Sequence[Snapshot]:
        return (await self.workers.store.snapshots.list(tenant="default")).items

    async def kept(self) -> list[str]:
        """The names of the tasks whose results are stored."""
        return sorted(snapshot.task for snapshot in await self.snapshots())

    def folder_of(self, snapshot: Snapshot) -> Path:
        return self.workers.settings.shared / "snapshots" / snapshot.folder

    async def content(self, name: str, path: str = "made") -> str:
        """What is in a file of the one snapshot that a task left."""
        (snapshot,) = [one for one in await self.snapshots() if one.task == name]
        return (self.folder_of(snapshot) / path).read_text()


async def left_by(workers: InProcessWorkers, job: Job) -> tuple[Any, dict[str, tuple[int, str]]]:
    """The result of a job, and its artifacts: path, size, digest."""
    found = await workers.get(job)
    last = [one for one in await workers.store.attempts.list(job.id) if one.ended_at is not None][-1]
    artifacts = FolderArtifacts(workers.settings.shared)
    files = {}
    for one in artifacts.list(job.id, last.attempt, last.token):
        with artifacts.open(job.id, last.attempt, last.token, one.path).content as file:
            files[one.path] = (one.size, hashlib.sha256(file.read()).hexdigest())
    return found.result, files


def expected(**files: str) -> dict[str, tuple[int, str]]:
    """Artifacts with these lines in them; in the names, `_` stands for a slash."""
    return {
        path.replace("_", "/"): (len(line) + 1, hashlib.sha256(f"{line}\n".encode()).hexdigest())
        for path, line in files.items()
    }
