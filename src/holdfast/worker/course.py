"""Where a pipeline stands, folded from what its supervisor said: pure, and the same for whoever adopts it.

A supervisor's events come in order and from the first on. Once it has acknowledged our token, nobody else can move it,
so what is known then is exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class TaskEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a task ended, and when: in microseconds of its supervisor's CLOCK_BOOTTIME, which is ours."""

    cause: str
    exit_code: int | None = None
    signal: int | None = None
    boottime: int | None = None

    @property
    def well(self) -> bool:
        return self.cause == "exit" and self.exit_code == 0

    def ago(self, now: float) -> float:
        """How many seconds before `now` it ended."""
        return 0.0 if self.boottime is None else max(0.0, now - self.boottime / 1_000_000)


class Course:
    """`at` is how many tasks the workspace has behind it; -1 until it is what the first of them is to begin with."""

    def __init__(self, names: Sequence[str], *, at: int) -> None:
        self._numbers = {name: n for n, name in enumerate(names)}
        self.at = at
        self.holding: int | None = None
        """The task before which it holds; behind the last, their number."""
        self.serving = False
        self.running: int | None = None
        self.ends: dict[int, TaskEnd] = {}

    @property
    def failed(self) -> str | None:
        """The name of the task that did not end well."""
        return next((name for name, n in self._numbers.items() if n in self.ends and not self.ends[n].well), None)

    def hear(self, event: Mapping[str, Any]) -> None:
        match event.get("event"):
            case "holding":
                self.holding = int(event["task"])
            case "task_started":
                self.holding = None
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
                self.at = tasks_in(event["name"])
            case "service_started":
                self.serving = True
            case "service_ended":
                self.serving = False


def tree_name(tasks: int, token: int) -> str:
    """What a restored tree is called until it takes its place: whose it is, and how many tasks it has behind it."""
    return f"after-{tasks}.{token}"


def tasks_in(name: str) -> int:
    return int(name.removeprefix("after-").partition(".")[0])
