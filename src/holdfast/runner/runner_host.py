"""What a worker gives to the function that builds a runner."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from holdfast.config import Settings
from holdfast.runner.base import Runner
from holdfast.runner.state_folder import StateFolder


@dataclass(frozen=True, kw_only=True)
class RunnerHost:
    """A worker's settings and folders. What a runner has to close at the end is pushed on `stack`."""

    settings: Settings
    installation: str
    state: StateFolder
    stack: AsyncExitStack


BuildRunner = Callable[[RunnerHost], Awaitable[Runner | None]]
"""What a descriptor's `build` names. None: this host cannot run such jobs, as if the runner was not installed."""
