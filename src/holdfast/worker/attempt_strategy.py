"""What a plain command and a pipeline do differently in an attempt. All else is the same, in `AttemptExecution`.

A plain command is one child that needs nothing from its worker while it runs; its outputs are collected at the end. A
pipeline (`pipeline_execution.py`) has tasks, and its worker decides at every task boundary what comes next.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from holdfast.runner.base import AttemptEnd, AttemptHandle
from holdfast.runner.secrets import NO_MASK, Mask
from holdfast.runner.workspace import PipelineStaging
from holdfast.worker.collect import CollectOutputs

QUICK, SLOW = 0.25, 1.0
"""Seconds between reads of the output: while there is some, and when it has been quiet for a while."""
QUIET_READS = 8
"""Reads without output after which it counts as quiet."""


class AttemptStrategy(Protocol):
    """How one attempt of a kind of job is prepared, driven and collected. An adopter calls `adopt` first."""

    task_names: Sequence[str]
    mask: Mask
    """Masks the secrets of the job, once they are known."""

    @property
    def failed_task(self) -> str | None:
        """The task that failed."""

    async def prepare(self) -> AttemptEnd | None:
        """Prepare a start. Return an AttemptEnd if there is nothing to start, or if it cannot be started."""

    def staging(self) -> PipelineStaging | None:
        """Return what the runner has to put in place in addition to the command's files."""

    async def adopt(self, running: AttemptHandle) -> None:
        """Continue an attempt that was started before."""

    def pace(self, quiet: int) -> float:
        """Return the seconds until the next read of the output, after so many reads without any."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Process an event of the supervisor."""

    def own_line(self, task: str | None, line: bytes) -> bytes:
        """Rewrite a line of stderr in the terms of the person who wrote the job."""

    async def drive(self, running: AttemptHandle) -> None:
        """Tell the supervisor what comes next. Cancelled at the end of the attempt."""

    async def settle(self) -> None:
        """Record what is known about the parts of an attempt that has ended."""

    def cached_outputs(self) -> CollectOutputs | None:
        """Return how to collect the outputs of a job that ended well without a start; None: it has none."""

    def collector(self, running: AttemptHandle, end: AttemptEnd) -> CollectOutputs:
        """Return how to collect the outputs of an attempt that has ended."""


class PlainCommand:
    """One command without tasks: its supervisor needs nothing from us until it ends."""

    task_names: Sequence[str] = ()
    mask = NO_MASK
    failed_task: str | None = None

    async def prepare(self) -> AttemptEnd | None:
        return None

    def staging(self) -> PipelineStaging | None:
        return None

    async def adopt(self, running: AttemptHandle) -> None:
        pass

    def pace(self, quiet: int) -> float:
        return SLOW if quiet > QUIET_READS else QUICK

    def on_event(self, event: Mapping[str, Any]) -> None:
        pass

    def own_line(self, task: str | None, line: bytes) -> bytes:
        return line

    async def drive(self, running: AttemptHandle) -> None:
        pass

    async def settle(self) -> None:
        pass

    def cached_outputs(self) -> CollectOutputs | None:
        return None

    def collector(self, running: AttemptHandle, end: AttemptEnd) -> CollectOutputs:
        return running.outputs
