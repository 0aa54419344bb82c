"""The interface of a connector. It knows nothing of leases, supervisors or stores."""

from pathlib import Path
from typing import Protocol

from holdfast.pipeline.plan import TaskPlan
from holdfast.runner.wire import WireService, WireTask
from holdfast.runner.workspace import WorkspacePaths

SQL = "holdfast-{n}.sql"
"""The expanded text of a task's SQL, among its inputs."""


class WorkspaceNotConsistent(Exception):
    """The workspace is not in a state that can be copied."""


class Connector(Protocol):
    """How tasks run in a workspace, and when it can be copied. `tree` is the workspace as this worker sees it."""

    serves: bool
    """Whether a service runs along with the tasks."""

    def engine(self) -> str | None:
        """Return the version of the server that this host uses for process jobs; it is part of every identity.

        Raise CannotStart if a server is needed and there is none.
        """

    def service(self, paths: WorkspacePaths) -> WireService | None:
        """Return the service that runs along with the tasks, if any."""

    def task(self, plan: TaskPlan, paths: WorkspacePaths) -> WireTask:
        """Return the program of a task."""

    def prepare(self, tree: Path, uid: int) -> bool:
        """Add to an empty workspace what this host's user cannot create; return whether anything was added.

        Called by root. The user then owns what was added.
        """

    def ready(self, tree: Path) -> bool:
        """Return whether the service accepts connections."""

    def check_quiet(self, tree: Path) -> None:
        """Verify that the service left the workspace consistent; raise WorkspaceNotConsistent if not."""


def command_of(plan: TaskPlan, paths: WorkspacePaths, **env: str) -> WireTask:
    """Build a task that runs its own command in the workspace."""
    assert plan.command is not None
    return WireTask(
        name=plan.name,
        argv=plan.command,
        env={**env, **plan.env, **path_variables(paths)},
        cwd=paths.tree,
        timeout=plan.timeout,
    )


def sql_file(plan: TaskPlan, paths: WorkspacePaths) -> str:
    """Return the path of a task's SQL, as the task sees it."""
    return f"{paths.inputs}/{SQL.format(n=plan.n)}"


def path_variables(paths: WorkspacePaths) -> dict[str, str]:
    """Return the environment that tells a task where its folders are."""
    return {"HOLDFAST_WORKSPACE": paths.tree, "HOLDFAST_INPUTS": paths.inputs}
