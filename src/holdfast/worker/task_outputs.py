"""Outputs of a pipeline's tasks: those of tasks that ran in this attempt, merged with those of cached tasks.

The tasks that run in an attempt write into its work folder, one after the other. A cached task ran in another attempt
or for another job: when the workspace is restored, its outputs are copied from its snapshot to a folder next to the
workspace that no task can reach:

    inherited/NAME/files          the files; NAME is that of the restored tree
    inherited/NAME/outputs.json   their manifest, the report, and which files of the work folder they replace

The tree that the supervisor moved in last decides which of these folders counts. So an adopter finds the same one, and
a worker whose lease expired unnoticed changes nothing. If paths collide, the later task wins.
"""

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast import decoding
from holdfast.errors import SnapshotDamaged
from holdfast.model import Cause, Outputs, Snapshot
from holdfast.permissions import write_file
from holdfast.pipeline.copying import full_disk_named
from holdfast.pipeline.outputs import ContentDiffers, copy_outputs, digest_of, files_in
from holdfast.pipeline.plan import Plan
from holdfast.pipeline.snapshots import Folders
from holdfast.runner.artifacts import Gathered, Limits, Violation, parse_report, remove_tree
from holdfast.runner.base import End, Running
from holdfast.runner.secrets import Mask
from holdfast.store.outcomes import encoded_result as check_result
from holdfast.worker.collect import Collect
from holdfast.worker.pipeline_progress import PipelineProgress, tasks_in, tree_name
from holdfast.worker.task_store import TaskStore

T = TypeVar("T")
INHERITED, FILES, ABOUT = "inherited", "files", "outputs.json"
UNLIMITED = Limits(bytes=sys.maxsize, entries=sys.maxsize)
"""For copies of outputs that were collected before; the limits are checked when the job collects them."""


class Replaced(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of what was in the work folder when outputs were inherited: the inherited ones replace it."""

    files: Mapping[str, str] = {}
    report: str | None = None


NOTHING_REPLACED = Replaced()


class Inherited(msgspec.Struct, frozen=True, kw_only=True):
    outputs: Outputs
    replaced: Replaced


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of all tasks up to one, about to be stored; `folder` is None if there are no files."""

    outputs: Outputs
    folder: Path | None


class TaskOutputs:
    """The outputs of one pipeline, during an attempt in this worker."""

    def __init__(self, folders: Folders, task_store: TaskStore, plan: Plan, progress: PipelineProgress) -> None:
        self._folders = folders
        self._task_store = task_store
        self._plan = plan
        self._progress = progress

    async def whole(self, row: Snapshot) -> bool:
        """Tell whether the outputs of a snapshot are complete; without them the task must run again."""
        try:
            outputs = await self._task_store.outputs(row)
        except SnapshotDamaged:
            return False
        return outputs is not None and await asyncio.to_thread(self._folders.outputs_whole, row.folder, outputs)

    async def take_known(self, gathered: Gathered) -> None:
        """Collect the cached outputs of a job that has nothing to run. Raise SnapshotDamaged if they are gone."""
        row = await self._task_store.use(self._plan.hash)
        outputs = None if row is None else await self._task_store.outputs(row)
        if row is None or outputs is None:
            raise SnapshotDamaged(f"snapshot {self._plan.hash} is gone")
        try:
            await asyncio.to_thread(lambda: self._folders.take_outputs(row.folder, outputs, gathered))
        except SnapshotDamaged:
            await self._task_store.drop(row)
            raise
        gathered.report = _encoded(outputs)

    def collector(self, running: Running, end: End) -> Collect:
        """Return how to collect the outputs of an ended attempt."""
        tasks, well = len(self._plan.tasks), end.cause is Cause.EXIT and end.exit_code == 0
        if well and self._progress.at < tasks:  # The last tasks were cached; the workspace was not restored to them.
            return _collector(running, _last_inherited(running.space, tasks))
        return _collector(running, self._progress.placed)

    async def collect_into(self, place: Path, running: Running, limits: Limits, mask: Mask) -> Collected:
        """Collect the outputs of all tasks so far into a folder. Raise Violation if they must not be reused.

        Raise CacheFull if the disk is full; the call may then be repeated.
        """
        gathered = Gathered(place / FILES, limits)
        with full_disk_named(place):
            try:
                await _collector(running, self._progress.placed)(gathered)
                report = None if gathered.report is None else parse_report(gathered.report)
                if report is not None and report.status != "succeeded":
                    raise Violation("result.json reports a failure")
                files = await asyncio.to_thread(lambda: files_in(gathered.place))
                result = None if report is None else mask.data(report.result)
                check_result(result)
                await asyncio.to_thread(gathered.publish)
            finally:
                await asyncio.to_thread(gathered.discard)
        outputs = Outputs(files=files, report=None if report is None else {"version": 1, "result": result})
        return Collected(outputs=outputs, folder=place / FILES if files else None)

    async def inherit_last(self, running: Running, token: int) -> bool:
        """Inherit the outputs of all tasks: the last ones are cached and do not run. Return False if they are gone."""
        if (row := await self._task_store.use(self._plan.hash)) is None:
            return False
        try:
            await self.inherit(running, row, tree_name(len(self._plan.tasks), token))
        except SnapshotDamaged:
            await self._task_store.drop(row)
            return False
        return True

    async def inherit(self, running: Running, row: Snapshot, name: str) -> None:
        """Copy the outputs of a snapshot next to the workspace; they count once the tree of this name is placed.

        The snapshot may be evicted after that. A snapshot of an older version has no outputs and can only be a base.
        """
        outputs = await self._task_store.outputs(row)
        if outputs is None and tasks_in(name):
            raise SnapshotDamaged(f"snapshot {row.id} was made by an older version, without outputs")
        found = outputs or Outputs()
        before = await _replaced(running) if self._progress.ends else NOTHING_REPLACED
        take = partial(self._folders.take_outputs, row.folder, found)
        await asyncio.to_thread(lambda: _inherit(running.space, name, found, before, take))


def _encoded(outputs: Outputs) -> bytes | None:
    """Encode a report as in `result.json`."""
    return None if outputs.report is None else msgspec.json.encode(outputs.report)


def _collector(running: Running, name: str | None) -> Collect:
    """Return how to collect the outputs of all tasks: those in the work folder and those inherited under a name."""

    async def collect(gathered: Gathered) -> None:
        await running.outputs(gathered)
        if name is not None:
            await asyncio.to_thread(lambda: _add(gathered, running.space.with_name(INHERITED) / name))

    return collect


def _add(gathered: Gathered, folder: Path) -> None:
    """Merge inherited outputs into those of the work folder, which win unless they are older than the inheritance."""
    try:
        inherited = decoding.decode((folder / ABOUT).read_bytes(), Inherited)
    except FileNotFoundError:
        return  # An older version started the attempt.
    gone = inherited.replaced
    for path, digest in gone.files.items():
        if (gathered.place / path).is_file() and digest_of(gathered.place / path) == digest:
            gathered.drop(path)
    if gathered.report is None or _digest(gathered.report) == gone.report:
        gathered.report = _encoded(inherited.outputs)
    try:
        copy_outputs(folder / FILES, inherited.outputs, gathered)
    except ContentDiffers as error:
        raise Violation(f"damaged copy on this host: an earlier task's output/{error}") from error


async def _replaced(running: Running) -> Replaced:
    """Return digests of the outputs of this attempt so far. A contract violation is reported at its end, not here."""
    gathered = Gathered(_made(running.space) / "replaced", UNLIMITED)
    try:
        await running.outputs(gathered)
        files = await asyncio.to_thread(lambda: files_in(gathered.place))
    except Violation:
        return NOTHING_REPLACED
    finally:
        await asyncio.to_thread(gathered.discard)
    report = None if gathered.report is None else _digest(gathered.report)
    return Replaced(files={file.path: file.sha256 for file in files}, report=report)


def _inherit(space: Path, name: str, outputs: Outputs, before: Replaced, take: Callable[[Gathered], None]) -> None:
    """Copy outputs next to a workspace, under the name of their tree, atomically."""
    folder = _made(space) / name
    temporary = folder.with_name(f".{name}")
    for leftover in (temporary, folder):
        remove_tree(leftover)
    temporary.mkdir(mode=0o700)
    gathered = Gathered(temporary / FILES, UNLIMITED)
    take(gathered)
    gathered.publish()
    write_file(temporary / ABOUT, msgspec.json.encode(Inherited(outputs=outputs, replaced=before)))
    temporary.rename(folder)


def _last_inherited(space: Path, tasks: int) -> str | None:
    """Return the name under which the latest owner inherited the outputs of `tasks` tasks."""
    try:
        names = os.listdir(space.with_name(INHERITED))
    except FileNotFoundError:
        return None
    known = [name for name in names if not name.startswith(".") and tasks_in(name) == tasks]
    return max(known, key=lambda name: int(name.rpartition(".")[2]), default=None)


def _made(space: Path) -> Path:
    place = space.with_name(INHERITED)
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@asynccontextmanager
async def in_threads(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and exit a context in threads: there may be many files to remove."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
