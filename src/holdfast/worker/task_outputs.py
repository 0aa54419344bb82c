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
from holdfast.pipeline.copying import map_full_disk
from holdfast.pipeline.outputs import ContentDiffers, copy_outputs, files_in
from holdfast.pipeline.plan import PipelinePlan
from holdfast.pipeline.snapshots import SnapshotFolders
from holdfast.runner.base import AttemptEnd, AttemptHandle
from holdfast.runner.collected_outputs import ArtifactLimits, CollectedOutputs, ContractViolation
from holdfast.runner.folder_writer import FolderWriter
from holdfast.runner.result_report import parse_report
from holdfast.runner.secrets import Mask
from holdfast.runner.tree_removal import remove_tree
from holdfast.store.outcomes import encoded_result as check_result
from holdfast.worker.collect import CollectOutputs
from holdfast.worker.pipeline_progress import PipelineProgress, tasks_in, tree_name
from holdfast.worker.task_store import TaskStore

T = TypeVar("T")
INHERITED, FILES, ABOUT = "inherited", "files", "outputs.json"
UNLIMITED = ArtifactLimits(bytes=sys.maxsize, entries=sys.maxsize)
"""For copies of outputs that were collected before; the limits are checked when the job collects them."""


class ReplacedOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of what was in the work folder when outputs were inherited: the inherited ones replace it."""

    files: Mapping[str, str] = {}
    report: str | None = None


NOTHING_REPLACED = ReplacedOutputs()


class InheritedOutputs(msgspec.Struct, frozen=True, kw_only=True):
    outputs: Outputs
    replaced: ReplacedOutputs


class OutputsToStore(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of all tasks up to one, about to be stored; `folder` is None if there are no files."""

    outputs: Outputs
    folder: Path | None


class TaskOutputs:
    """The outputs of one pipeline, during an attempt in this worker."""

    def __init__(
        self, folders: SnapshotFolders, task_store: TaskStore, plan: PipelinePlan, progress: PipelineProgress
    ) -> None:
        self._folders = folders
        self._task_store = task_store
        self._plan = plan
        self._progress = progress

    async def whole(self, row: Snapshot) -> bool:
        """Return whether the outputs of a snapshot are complete; without them the task must run again."""
        try:
            outputs = await self._task_store.outputs(row)
        except SnapshotDamaged:
            return False
        return outputs is not None and await asyncio.to_thread(self._folders.outputs_complete, row.folder, outputs)

    async def collect_cached(self, collected: CollectedOutputs) -> None:
        """Collect the cached outputs of a job that has nothing to run. Raise SnapshotDamaged if they are gone."""
        row = await self._task_store.use(self._plan.hash)
        outputs = None if row is None else await self._task_store.outputs(row)
        if row is None or outputs is None:
            raise SnapshotDamaged(f"snapshot {self._plan.hash} is gone")
        try:
            await asyncio.to_thread(lambda: self._folders.collect_outputs(row.folder, outputs, collected))
        except SnapshotDamaged:
            await self._task_store.drop(row)
            raise
        collected.report = _encoded(outputs)

    def collector(self, running: AttemptHandle, end: AttemptEnd) -> CollectOutputs:
        """Return how to collect the outputs of an ended attempt."""
        tasks, well = len(self._plan.tasks), end.cause is Cause.EXIT and end.exit_code == 0
        if well and self._progress.at < tasks:  # The last tasks were cached; the workspace was not restored to them.
            return _collector(running, _last_inherited(running.workspace, tasks))
        return _collector(running, self._progress.restored_tree)

    async def collect_into(
        self, folder: Path, running: AttemptHandle, limits: ArtifactLimits, mask: Mask
    ) -> OutputsToStore:
        """Collect the outputs of all tasks so far into a folder. Raise Violation if they must not be reused.

        Raise CacheFull if the disk is full; the call may then be repeated.
        """
        writer = FolderWriter(folder / FILES)
        collected = CollectedOutputs(writer, limits)
        with map_full_disk(folder):
            try:
                await _collector(running, self._progress.restored_tree)(collected)
                report = None if collected.report is None else parse_report(collected.report)
                if report is not None and report.status != "succeeded":
                    raise ContractViolation("result.json reports a failure")
                files = await asyncio.to_thread(lambda: files_in(writer.staging))
                result = None if report is None else mask.data(report.result)
                check_result(result)
                await asyncio.to_thread(collected.publish)
            finally:
                await asyncio.to_thread(collected.discard)
        outputs = Outputs(files=files, report=None if report is None else {"version": 1, "result": result})
        return OutputsToStore(outputs=outputs, folder=folder / FILES if files else None)

    async def inherit_last(self, running: AttemptHandle, token: int) -> bool:
        """Inherit the outputs of all tasks: the last ones are cached and do not run. Return False if they are gone."""
        if (row := await self._task_store.use(self._plan.hash)) is None:
            return False
        try:
            await self.inherit(running, row, tree_name(len(self._plan.tasks), token))
        except SnapshotDamaged:
            await self._task_store.drop(row)
            return False
        return True

    async def inherit(self, running: AttemptHandle, row: Snapshot, name: str) -> None:
        """Copy the outputs of a snapshot next to the workspace; they count once the tree of this name is moved in.

        The snapshot may be evicted after that. A snapshot of an older version has no outputs and can only be a base.
        """
        outputs = await self._task_store.outputs(row)
        if outputs is None and tasks_in(name):
            raise SnapshotDamaged(f"snapshot {row.id} was made by an older version, without outputs")
        found = outputs or Outputs()
        before = await _replaced(running) if self._progress.ends else NOTHING_REPLACED
        take = partial(self._folders.collect_outputs, row.folder, found)
        await asyncio.to_thread(lambda: _inherit(running.workspace, name, found, before, take))


def _encoded(outputs: Outputs) -> bytes | None:
    """Encode a report as in `result.json`."""
    return None if outputs.report is None else msgspec.json.encode(outputs.report)


def _collector(running: AttemptHandle, name: str | None) -> CollectOutputs:
    """Return how to collect the outputs of all tasks: those in the work folder and those inherited under a name."""

    async def collect(collected: CollectedOutputs) -> None:
        await running.outputs(collected)
        if name is not None:
            await asyncio.to_thread(lambda: _add(collected, running.workspace.with_name(INHERITED) / name))

    return collect


def _add(collected: CollectedOutputs, folder: Path) -> None:
    """Merge inherited outputs into those of the work folder, which win unless they are older than the inheritance."""
    try:
        inherited = decoding.decode((folder / ABOUT).read_bytes(), InheritedOutputs)
    except FileNotFoundError:
        return  # An older version started the attempt.
    gone = inherited.replaced
    for path, digest in gone.files.items():
        if collected.digest(path) == digest:
            collected.drop(path)
    if collected.report is None or _digest(collected.report) == gone.report:
        collected.report = _encoded(inherited.outputs)
    try:
        copy_outputs(folder / FILES, inherited.outputs, collected)
    except ContentDiffers as error:
        raise ContractViolation(f"damaged copy on this host: an earlier task's output/{error}") from error


async def _replaced(running: AttemptHandle) -> ReplacedOutputs:
    """Return digests of the outputs of this attempt so far. A contract violation is reported at its end, not here."""
    writer = FolderWriter(_made(running.workspace) / "replaced")
    collected = CollectedOutputs(writer, UNLIMITED)
    try:
        await running.outputs(collected)
        files = await asyncio.to_thread(lambda: files_in(writer.staging))
    except ContractViolation:
        return NOTHING_REPLACED
    finally:
        await asyncio.to_thread(collected.discard)
    report = None if collected.report is None else _digest(collected.report)
    return ReplacedOutputs(files={file.path: file.sha256 for file in files}, report=report)


def _inherit(
    workspace: Path, name: str, outputs: Outputs, before: ReplacedOutputs, take: Callable[[CollectedOutputs], None]
) -> None:
    """Copy outputs next to a workspace, under the name of their tree, atomically."""
    folder = _made(workspace) / name
    temporary = folder.with_name(f".{name}")
    for leftover in (temporary, folder):
        remove_tree(leftover)
    temporary.mkdir(mode=0o700)
    collected = CollectedOutputs(FolderWriter(temporary / FILES), UNLIMITED)
    take(collected)
    collected.publish()
    write_file(temporary / ABOUT, msgspec.json.encode(InheritedOutputs(outputs=outputs, replaced=before)))
    temporary.rename(folder)


def _last_inherited(workspace: Path, tasks: int) -> str | None:
    """Return the name under which the latest owner inherited the outputs of `tasks` tasks."""
    try:
        names = os.listdir(workspace.with_name(INHERITED))
    except FileNotFoundError:
        return None
    known = [name for name in names if not name.startswith(".") and tasks_in(name) == tasks]
    return max(known, key=lambda name: int(name.rpartition(".")[2]), default=None)


def _made(workspace: Path) -> Path:
    folder = workspace.with_name(INHERITED)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


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
