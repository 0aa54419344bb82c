"""The interface of all runners: `Runner` starts, finds and sweeps attempts, `AttemptHandle` is one of them.

Nothing here knows queues, leases or SQL.

An attempt has an identity that never changes: installation, job, attempt. By it a runner finds attempts that another
worker started; the token of the lease is not part of it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from holdfast.limits import AttemptLimits, LimitSettings
from holdfast.model import Cause, Error, Json
from holdfast.runner.artifacts import InputFile
from holdfast.runner.collected_outputs import CollectedOutputs
from holdfast.runner.frames import Frame
from holdfast.runner.wire import Command
from holdfast.runner.workspace import PipelineStaging


class Identity(msgspec.Struct, frozen=True):
    """Names an attempt. `mark` is its text form, which every process of the attempt has in its environment."""

    installation: str
    job: str
    attempt: int

    @property
    def mark(self) -> str:
        return f"{self.installation}/{self.job}/{self.attempt}"


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, as its runner saw it. `error` is more specific than the cause."""

    cause: Cause
    exit_code: int | None = None
    signal: int | None = None
    error: Error | None = None
    result: Json = None
    task: str | None = None
    """The task of a pipeline that was running at the end."""
    last_error: str | None = None
    """The last line on stderr."""
    final: bool = False
    """Another attempt would fail, too: the function raised an exception that its retry does not name."""
    retry_asked: bool = False
    """The function asked to run again: in `retry_after` seconds, or after the job's backoff."""
    retry_after: float | None = None
    output_bytes: tuple[int, int] | None = None
    """Bytes written to stdout and stderr, if known, without those above the output cap."""


class StartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt to start, in the recorded domain. `start_by` and `stop_after` are times of CLOCK_BOOTTIME."""

    identity: Identity
    domain: str
    token: int
    spec: Mapping[str, Any]
    inputs: Json
    start_by: float
    timeout: float | None = None
    idle_timeout: float | None = None
    stop_grace: float = 5.0
    stop_after: float | None = None
    secrets: Mapping[str, str] = {}
    files: Mapping[str, InputFile] = {}
    """Files for `input/` of the work folder, by their relative names."""
    pipeline: PipelineStaging | None = None


class ContainerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Default limits of a container."""

    memory: str = "1g"
    cpus: float = 1.0
    pids: int = 256
    attempt: LimitSettings = LimitSettings()
    """Limits of files and folders, and their ceilings."""


class CannotStart(Exception):
    """The attempt cannot be started; nothing runs. `code` tells whether another attempt would fail too."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = Error(code=code, message=message)


class StartTooLate(Exception):
    """The deadline for the start has passed; nothing runs."""


class NoSpace(Exception):
    """The disk is full, so the attempt could not be started; nothing runs. The job waits for space."""


class EngineUnreachable(Exception):
    """The engine does not answer, or is not the same as before. The attempt's state is unknown; it is not lost."""


AttemptState = Literal["missing", "running", "exited", "died", "forbidden"]
"""`forbidden`: nothing ran, and a start marker prevents any start."""
ConfirmLease = Callable[[], Awaitable[None]]
"""Checks in the record that the lease is still ours, just before a start; raises if it is not."""


class AttemptHandle(Protocol):
    """One attempt under its supervisor, started by us or by another worker."""

    @property
    def workspace(self) -> Path:
        """The folder of a pipeline's workspace, as this worker sees it."""

    async def frames(self, most: int) -> Sequence[Frame]:
        """Return the next complete frames of the log; none if there is nothing new."""

    async def send(self, command: Command) -> str:
        """Send a command and return the name that its `ack` will carry."""

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` on this event loop when the attempt ends. Callers still poll `over`."""

    @property
    def over(self) -> bool:
        """Whether the supervisor has ended."""

    def send_from_thread(self, command: Command) -> None:
        """Send a command from any thread, without waiting."""

    async def collect(self) -> AttemptEnd | None:
        """Return how the attempt ended; None if some of its processes could not be killed."""

    async def outputs(self, collected: CollectedOutputs) -> None:
        """Collect the files under `output/`, and `result.json`."""

    async def limits(self) -> AttemptLimits:
        """Return the limits recorded at the start; an adopter applies the same ones."""

    async def size(self, most: int) -> int | None:
        """Return the size of its folder, counted until it exceeds `most`; None if it cannot be measured from here."""

    async def secrets(self) -> Sequence[str]:
        """Return the secrets that the attempt was given, to mask them in its output."""

    def close(self) -> None:
        """Release our resources; the attempt keeps running."""

    async def remove(self, *, had_other_owners: bool) -> None:
        """Remove the files of the attempt, after its end is recorded."""


class Runner(Protocol):
    """How attempts of one capability execute. It can find attempts in `domains`; new ones start in `domain`.

    While its engine is unreachable, a runner has no domains, and methods that need the engine raise EngineUnreachable.
    """

    capability: str

    @property
    def domain(self) -> str: ...

    @property
    def domains(self) -> Sequence[str]: ...

    @property
    def away(self) -> str | None:
        """Why no attempt can start now, as a text for people; None if attempts can start."""

    def pause(self, why: str) -> None:
        """Start nothing for a while: a start found the disk full. Attempts here can still be found and swept."""

    @property
    def paused(self) -> str | None:
        """Why nothing starts for now, if a start found the disk full; this is also `away`."""

    def note_failure(self) -> None:
        """Note that the engine did not answer or the host is exhausted: check it, and start nothing for now."""

    async def watch(self, changed: Callable[[], None]) -> None:
        """Watch the engine while the worker runs; call `changed` when it appears, disappears or is replaced."""

    async def digest(self, spec: Mapping[str, Any], domain: str) -> str | None:
        """Return the digest of the image that a spec names; None for runners without images."""

    def start_slot(self) -> AbstractAsyncContextManager[None]:
        """Wait for a start slot, so that an engine is not asked for more starts than it can do at once."""

    async def start(self, request: StartRequest, confirm: ConfirmLease) -> AttemptHandle:
        """Start an attempt. If it has started already, return that one."""

    async def find(
        self, identity: Identity, domain: str, *, stdout: int, stderr: int
    ) -> tuple[AttemptState, AttemptHandle]:
        """Look for an attempt in the domain where it was started, to read its log from these offsets."""

    async def forbid(self, identity: Identity, domain: str) -> bool:
        """Prevent an attempt from ever starting, even by a slow previous owner. Return False if it has started."""

    async def remaining_attempts(self) -> Sequence[Identity]:
        """Return all attempts of this installation that have remains here."""

    def to_sweep(self, over: Sequence[Identity], found: int) -> Sequence[Identity]:
        """Return which attempts to sweep: `over` are those that have ended, out of `found` that are here."""

    async def sweep(self, identity: Identity) -> bool:
        """Remove the remains of an attempt whose end is recorded, stopping it first. Return whether it is gone."""

    async def sweep_incomplete(self, older: float) -> int:
        """Remove incomplete folders or volumes older than `older` seconds; return how many."""
