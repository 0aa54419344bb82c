"""Outputs of a pipeline's tasks: what the tasks of an attempt leave, together with what earlier ones left elsewhere.

The tasks that run in an attempt leave their files in its work folder, one after the other. A task that is not repeated
ran in another attempt, or for another job: its outputs are copied from its snapshot when the workspace is restored, to
a folder beside the workspace that no task can reach:

    inherited/NAME/files          the files; NAME is that of the restored tree
    inherited/NAME/outputs.json   their manifest, the report, and what of the work folder they replace

The supervisor says which tree it moved in last, and that decides which of these folders counts. So an adopter finds the
same one, and a worker that slept through its lease changes nothing. Later tasks win where paths collide.
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

from holdfast.errors import SnapshotDamaged
from holdfast.model import Cause, Outputs, Snapshot
from holdfast.pipeline.copying import full_disk_named
from holdfast.pipeline.outputs import ContentDiffers, copy_outputs, digest_of, files_in
from holdfast.pipeline.plan import Plan
from holdfast.pipeline.snapshots import Folders
from holdfast.runner.base import End, Running
from holdfast.runner.outputs import Gathered, Limits, Violation, parse_report, remove_tree
from holdfast.runner.secrets import Mask
from holdfast.store.outcomes import encoded_result as check_result
from holdfast.worker.course import Course, tasks_in, tree_name
from holdfast.worker.ledger import Ledger
from holdfast.worker.taking import Collect

T = TypeVar("T")
INHERITED, FILES, ABOUT = "inherited", "files", "outputs.json"
UNLIMITED = Limits(bytes=sys.maxsize, entries=sys.maxsize)
"""For copies of what was taken before; the caps are checked when the job takes it."""


class Replaced(msgspec.Struct, frozen=True, kw_only=True):
    """What was in the work folder when outputs were inherited that stand for all tasks up to then: digests."""

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
    """The outputs of one pipeline, while an attempt of it is in this worker's hands."""

    def __init__(self, folders: Folders, ledger: Ledger, plan: Plan, course: Course) -> None:
        self._folders = folders
        self._ledger = ledger
        self._plan = plan
        self._course = course

    async def whole(self, row: Snapshot) -> bool:
        """Whether a snapshot has its outputs: one without stands for no run."""
        try:
            outputs = await self._ledger.outputs(row)
        except SnapshotDamaged:
            return False
        return outputs is not None and await asyncio.to_thread(self._folders.outputs_whole, row.folder, outputs)

    async def take_known(self, gathered: Gathered) -> None:
        """Gather what the tasks left when they ran, for a job that has nothing to run. SnapshotDamaged: it is gone."""
        row = await self._ledger.use(self._plan.hash)
        outputs = None if row is None else await self._ledger.outputs(row)
        if row is None or outputs is None:
            raise SnapshotDamaged(f"snapshot {self._plan.hash} is gone")
        try:
            await asyncio.to_thread(lambda: self._folders.take_outputs(row.folder, outputs, gathered))
        except SnapshotDamaged:
            await self._ledger.drop(row)
            raise
        gathered.report = _encoded(outputs)

    def collector(self, running: Running, end: End) -> Collect:
        """Say how to gather what an attempt left that has ended."""
        tasks, well = len(self._plan.tasks), end.cause is Cause.EXIT and end.exit_code == 0
        if well and self._course.at < tasks:  # The last tasks were known, and the workspace not brought up to them.
            return _collector(running, _last_inherited(running.space, tasks))
        return _collector(running, self._course.placed)

    async def collect_into(self, place: Path, running: Running, limits: Limits, mask: Mask) -> Collected:
        """Gather the outputs of all tasks so far into a folder. Violation: they must not be stored for reuse.

        A full disk is CacheFull. May be called again after that.
        """
        gathered = Gathered(place / FILES, limits)
        with full_disk_named(place):
            try:
                await _collector(running, self._course.placed)(gathered)
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
        """Take over what all tasks left: the last ones are known, so the attempt ends without them. False: not now."""
        if (row := await self._ledger.use(self._plan.hash)) is None:
            return False
        try:
            await self.inherit(running, row, tree_name(len(self._plan.tasks), token))
        except SnapshotDamaged:
            await self._ledger.drop(row)
            return False
        return True

    async def inherit(self, running: Running, row: Snapshot, name: str) -> None:
        """Copy the outputs of a snapshot beside the workspace; they count once the tree of this name is placed.

        From then on the snapshot may go. Of those made by older versions only a base is used, and it has no outputs.
        """
        outputs = await self._ledger.outputs(row)
        if outputs is None and tasks_in(name):
            raise SnapshotDamaged(f"snapshot {row.id} was made by an older version, without outputs")
        found = outputs or Outputs()
        before = await _replaced(running) if self._course.ends else NOTHING_REPLACED
        take = partial(self._folders.take_outputs, row.folder, found)
        await asyncio.to_thread(lambda: _inherit(running.space, name, found, before, take))


def _encoded(outputs: Outputs) -> bytes | None:
    """Write a report as `result.json` had it."""
    return None if outputs.report is None else msgspec.json.encode(outputs.report)


def _collector(running: Running, name: str | None) -> Collect:
    """Say how to gather the outputs of all tasks: those in the work folder, and those inherited under a name."""

    async def collect(gathered: Gathered) -> None:
        await running.outputs(gathered)
        if name is not None:
            await asyncio.to_thread(lambda: _add(gathered, running.space.with_name(INHERITED) / name))

    return collect


def _add(gathered: Gathered, folder: Path) -> None:
    """Add what was inherited to what is in the work folder, which is later unless it was there before."""
    try:
        inherited = msgspec.json.decode((folder / ABOUT).read_bytes(), type=Inherited)
    except FileNotFoundError:
        return  # The attempt was begun by an older version.
    gone = inherited.replaced
    for path, digest in gone.files.items():
        if (gathered.place / path).is_file() and digest_of(gathered.place / path) == digest:
            gathered.drop(path)
    if gathered.report is None or _digest(gathered.report) == gone.report:
        gathered.report = _encoded(inherited.outputs)
    try:
        copy_outputs(folder / FILES, inherited.outputs, gathered)
    except ContentDiffers as error:
        raise Violation(f"the copy of an earlier task's output/{error} on this host") from error


async def _replaced(running: Running) -> Replaced:
    """Look what the tasks of this attempt have left so far. What cannot be gathered is for its end to judge."""
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
    """Copy outputs beside a workspace, under the name of the tree that they belong to: whole, or not at all."""
    folder = _made(space) / name
    temporary = folder.with_name(f".{name}")
    for leftover in (temporary, folder):
        remove_tree(leftover)
    temporary.mkdir(mode=0o700)
    gathered = Gathered(temporary / FILES, UNLIMITED)
    take(gathered)
    gathered.publish()
    (temporary / ABOUT).write_bytes(msgspec.json.encode(Inherited(outputs=outputs, replaced=before)))
    temporary.rename(folder)


def _last_inherited(space: Path, tasks: int) -> str | None:
    """The name under which the outputs of so many tasks were inherited, by the latest owner that did so."""
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
    """Enter and leave a context in threads: it may have many files to remove."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
