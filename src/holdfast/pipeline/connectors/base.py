"""What a connector answers. It knows nothing of leases, supervisors or stores."""

from pathlib import Path
from typing import Protocol

from holdfast.pipeline.plan import TaskPlan
from holdfast.runner.space import Place
from holdfast.runner.spec import Service, Task


class NotQuiet(Exception):
    """The workspace is not in a state that may be copied."""


class Connector(Protocol):
    """How tasks run in a workspace, and when it may be copied. `tree` is the workspace as this worker sees it."""

    serves: bool
    """Whether a service runs beside the tasks."""

    def engine(self) -> str | None:
        """The version of the server that runs beside processes on this host, as part of every identity.

        Raises CannotStart where there is none, and one is needed.
        """

    def service(self, place: Place) -> Service | None:
        """What runs beside the tasks."""

    def task(self, plan: TaskPlan, place: Place) -> Task:
        """What a task runs."""

    def prepare(self, tree: Path, uid: int) -> bool:
        """Put into an empty workspace what this user of the host cannot make; say whether there was anything.

        Called by root. Whatever is put there becomes the user's.
        """

    def ready(self, tree: Path) -> bool:
        """Whether the service takes work."""

    def check_quiet(self, tree: Path) -> None:
        """Make sure that the service left the workspace whole; raises NotQuiet."""


def command_of(plan: TaskPlan, place: Place, **env: str) -> Task:
    """A task's own command, in the workspace."""
    assert plan.command is not None
    return Task(
        name=plan.name,
        argv=plan.command,
        env={**env, **plan.env, **places(place)},
        cwd=place.tree,
        timeout=plan.timeout,
    )


def places(place: Place) -> dict[str, str]:
    """What tells a task where its things are."""
    return {"HOLDFAST_WORKSPACE": place.tree, "HOLDFAST_INPUTS": place.inputs}
