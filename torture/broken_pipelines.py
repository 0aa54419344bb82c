"""Broken builds of pipelines, for broken_builds.py: each removes one of their safeguards."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.model import Outputs, Snapshot
from holdfast.pipeline.snapshots import CopiedFolder, SnapshotFolders
from holdfast.runner.collected_outputs import CollectedOutputs
from holdfast.worker.pipeline_execution import PipelineExecution
from holdfast.worker.task_store import TaskStore


def known_results_overlooked() -> None:
    """Stored results are not looked up again under the lock."""
    lock = TaskStore.lock

    async def blind(self: TaskStore, snapshot: str) -> bool:
        return await lock(self, snapshot) or snapshot in await self.known([snapshot])

    async def nothing(self: PipelineExecution, beyond: int = 0) -> int:
        return 0

    TaskStore.lock = blind  # type: ignore[method-assign]
    PipelineExecution._done = nothing  # type: ignore[method-assign]


def build_without_lock() -> None:
    """A job starts to build although another one holds the lock."""
    lock = TaskStore.lock

    async def impatient(self: TaskStore, snapshot: str) -> bool:
        await lock(self, snapshot)
        return True

    TaskStore.lock = impatient  # type: ignore[method-assign]


def snapshot_without_a_file() -> None:
    """A snapshot that lacks a file is published."""
    copy = SnapshotFolders.copy

    def lossy(self: SnapshotFolders, snapshot: str, workspace: Any, outputs: Any = None) -> CopiedFolder:
        (workspace / "whole").unlink(missing_ok=True)
        return copy(self, snapshot, workspace, outputs)

    SnapshotFolders.copy = lossy  # type: ignore[method-assign]


def tasks_called_cached() -> None:
    """A task that ran is recorded as cached."""

    async def wrong(self: TaskStore, n: int, status: Any, end: Any) -> None:
        await self.write(n, status, cached=status == "succeeded")

    TaskStore.close = wrong  # type: ignore[method-assign]


def known_outputs_dropped() -> None:
    """A restored snapshot brings its workspace, but not its outputs."""

    async def nothing(self: TaskStore, snapshot: Snapshot) -> Outputs | None:
        return Outputs()

    TaskStore.outputs = nothing  # type: ignore[method-assign]


def earlier_outputs_win() -> None:
    """Inherited outputs overwrite those of the tasks that ran later."""

    def never(self: CollectedOutputs, name: str) -> bool:
        if name == "last":
            with contextlib.suppress(FileNotFoundError):
                self.drop(name)
        return holds(self, name)

    holds = CollectedOutputs.has
    CollectedOutputs.has = never  # type: ignore[method-assign]


KNOWN_AGAIN = ["known_results_are_not_built_again", "one_builder_per_snapshot"]
PIPELINES: dict[str, tuple[Callable[[], None], Sequence[str]]] = {
    "known_results_overlooked": (known_results_overlooked, KNOWN_AGAIN),
    "build_without_lock": (build_without_lock, KNOWN_AGAIN),
    "snapshot_without_a_file": (snapshot_without_a_file, ["snapshots_are_what_their_trail_says", "tasks_run_in_order"]),
    "known_outputs_dropped": (known_outputs_dropped, ["pipelines_have_the_outputs_of_their_tasks"]),
    "earlier_outputs_win": (earlier_outputs_win, ["pipelines_have_the_outputs_of_their_tasks"]),
    "tasks_called_cached": (tasks_called_cached, ["cached_tasks_do_not_run"]),
}
