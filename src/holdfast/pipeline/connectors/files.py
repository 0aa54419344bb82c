"""A workspace of plain files. Between tasks nothing runs, so it is quiet."""

from pathlib import Path

from holdfast.pipeline.connectors.base import command_of
from holdfast.pipeline.plan import TaskPlan
from holdfast.runner.wire import WireTask
from holdfast.runner.workspace import WorkspacePaths


class FilesConnector:
    serves = False

    def engine(self) -> None:
        return None

    def service(self, paths: WorkspacePaths) -> None:
        return None

    def task(self, plan: TaskPlan, paths: WorkspacePaths) -> WireTask:
        return command_of(plan, paths)

    def prepare(self, tree: Path, uid: int) -> bool:
        return False

    def ready(self, tree: Path) -> bool:
        return True

    def check_quiet(self, tree: Path) -> None:
        """Do nothing: between tasks no process writes to the workspace."""
