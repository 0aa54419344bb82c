"""The workspace of a pipeline, and the service in it, while the supervisor waits at a task boundary.

A tree is restored next to the workspace, and the supervisor moves it in: it compares the token in the same step. Every
step may be repeated by an adopter.
"""

import asyncio
from pathlib import Path

from holdfast.errors import SnapshotDamaged
from holdfast.model import Lease, Snapshot
from holdfast.pipeline.connectors import connector_of
from holdfast.pipeline.plan import PipelinePlan
from holdfast.pipeline.snapshots import SnapshotFolders
from holdfast.runner.base import AttemptHandle, NoSpace
from holdfast.runner.start_pause import needs_space
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.wire import Command
from holdfast.runner.workspace import TREE, give_like, replaced_by
from holdfast.worker.execution_services import ExecutionServices
from holdfast.worker.pipeline_progress import PipelineProgress, tree_name
from holdfast.worker.supervisor_link import SupervisorLink, until
from holdfast.worker.task_outputs import TaskOutputs
from holdfast.worker.task_store import TaskStore


class PipelineWorkspace:
    def __init__(
        self,
        services: ExecutionServices,
        lease: Lease,
        link: SupervisorLink,
        *,
        folders: SnapshotFolders,
        plan: PipelinePlan,
        progress: PipelineProgress,
        task_store: TaskStore,
        outputs: TaskOutputs,
    ) -> None:
        self._services = services
        self._lease = lease
        self._link = link
        self._folders = folders
        self._plan = plan
        self._connector = connector_of(plan.connector)
        self._progress = progress
        self._task_store = task_store
        self._outputs = outputs

    async def restore(self, running: AttemptHandle, done_tasks: int) -> bool:
        """Restore the workspace to the state after `done_tasks` tasks. Return False if that snapshot is gone."""
        if self._progress.at == done_tasks:
            return True
        await self.stop_service(running)
        snapshot = self._plan.tasks[done_tasks - 1].snapshot if done_tasks else self._plan.base
        assert snapshot is not None  # Without a base, the empty workspace is the state after 0 tasks.
        if (row := await self._task_store.use(snapshot)) is None:
            if not done_tasks:
                raise SnapshotDamaged(f"snapshot {snapshot}, the base of this pipeline, is gone")
            return False
        target = running.workspace / tree_name(done_tasks, self._lease.token)
        if not await self._bring(running, row, target):
            return False
        move_in = Command(token=self._lease.token, verb="place", name=target.name)
        await self._link.send_until(running, move_in, lambda: self._progress.at == done_tasks)
        self._at("placed")
        await asyncio.to_thread(lambda: remove_tree(replaced_by(target)))
        return True

    async def _bring(self, running: AttemptHandle, row: Snapshot, target: Path) -> bool:
        """Copy the tree and the outputs of a snapshot next to the workspace. Return False if they are damaged."""
        try:
            with needs_space("cannot restore the workspace"):
                await asyncio.to_thread(lambda: self._fill(target, row))
                self._at("restored")
                await self._outputs.inherit(running, row, target.name)
                self._at("inherited")
        except SnapshotDamaged:
            await self._task_store.drop(row)
            return False
        except NoSpace:
            await asyncio.to_thread(lambda: _unfill(target))
            raise
        return True

    def _fill(self, target: Path, row: Snapshot) -> None:
        """Restore next to the workspace, then move the tree in: the tasks own everything inside."""
        _unfill(target)
        made = _made(target)
        self._folders.restore(row.folder, row.digest, made)
        give_like(made, target.parent / TREE)
        made.rename(target)

    async def start_service(self, running: AttemptHandle) -> None:
        """Start the service unless it runs, and wait until it is ready."""
        if not self._connector.serves:
            return
        if not self._progress.serving:
            start = Command(token=self._lease.token, verb="service", kind="start")
            await self._link.send_until(running, start, lambda: self._progress.serving)
        await until(lambda: self._connector.ready(running.workspace / TREE))
        self._at("serving")

    async def stop_service(self, running: AttemptHandle) -> None:
        if self._progress.serving:
            stop = Command(token=self._lease.token, verb="service", kind="stop")
            await self._link.send_until(running, stop, lambda: not self._progress.serving)

    def _at(self, step: str) -> None:
        self._services.at(step, self._lease)


def _unfill(target: Path) -> None:
    """Remove what an earlier try to restore left."""
    for leftover in (_made(target), target, replaced_by(target)):
        remove_tree(leftover)


def _made(target: Path) -> Path:
    """Where a tree is restored before it is moved into the workspace."""
    return target.parent.parent / f".{target.name}"
