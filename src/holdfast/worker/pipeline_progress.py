"""The progress of a pipeline, folded from the events of its supervisor. Pure: an adopter computes the same.

Events arrive in order, starting with the first. Once the supervisor has acknowledged our token, no other worker can
command it, so the progress is exact from then on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class TaskEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a task ended, and when: in microseconds of CLOCK_BOOTTIME, which supervisor and worker share."""

    cause: str
    exit_code: int | None = None
    signal: int | None = None
    boottime: int | None = None

    @property
    def well(self) -> bool:
        return self.cause == "exit" and self.exit_code == 0

    def ago(self, now: float) -> float:
        """Return how many seconds before `now` the task ended."""
        return 0.0 if self.boottime is None else max(0.0, now - self.boottime / 1_000_000)


class PipelineProgress:
    """`at` is how many tasks the workspace has the results of; -1 until the base is restored."""

    def __init__(self, names: Sequence[str], *, at: int) -> None:
        self._numbers = {name: n for n, name in enumerate(names)}
        self.at = at
        self.restored_tree: str | None = None
        """The name of the restored tree that was moved in last; None if the workspace began empty."""
        self.waiting_before: int | None = None
        """The task before which the supervisor waits; after the last task, the number of tasks."""
        self.serving = False
        self.running: int | None = None
        self.ends: dict[int, TaskEnd] = {}

    @property
    def failed(self) -> str | None:
        """The name of the task that failed."""
        return next((name for name, n in self._numbers.items() if n in self.ends and not self.ends[n].well), None)

    def on_event(self, event: Mapping[str, Any]) -> None:
        match event.get("event"):
            case "holding":
                self.waiting_before = int(event["task"])
            case "task_started":
                self.waiting_before = None
                self.running = self._numbers[event["name"]]
            case "task_ended":
                n = self._numbers[event["name"]]
                end = TaskEnd(
                    cause=event["cause"],
                    exit_code=event.get("code"),
                    signal=event.get("signal"),
                    boottime=event.get("boottime"),
                )
                self.running = None
                self.ends[n] = end
                self.at = n + 1 if end.well else self.at
            case "placed":
                self.restored_tree = event["name"]
                self.at = tasks_in(event["name"])
            case "service_started":
                self.serving = True
            case "service_ended":
                self.serving = False


def tree_name(tasks: int, token: int) -> str:
    """Name a restored tree until it is moved in, by the number of tasks it includes and its owner's token."""
    return f"after-{tasks}.{token}"


def tasks_in(name: str) -> int:
    return int(name.removeprefix("after-").partition(".")[0])
