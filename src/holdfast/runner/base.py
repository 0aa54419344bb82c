"""What every runner answers: start, find, wait, stop, collect. It knows nothing of queues, leases or SQL.

An attempt has an identity that never changes: installation, job, attempt. By it a runner finds again what another
worker started; the token of the lease is no part of it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from holdfast.model import Cause, Error, Json
from holdfast.runner.frames import Frame
from holdfast.runner.outputs import Gathered
from holdfast.runner.space import Staging
from holdfast.runner.spec import Command


class Identity(msgspec.Struct, frozen=True):
    installation: str
    job: str
    attempt: int

    @property
    def mark(self) -> str:
        return f"{self.installation}/{self.job}/{self.attempt}"


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, as its runner saw it. `error` names more than the cause does."""

    cause: Cause
    exit_code: int | None = None
    signal: int | None = None
    error: Error | None = None
    result: Json = None
    task: str | None = None
    """The task of a pipeline that it ended in."""
    last_error: str | None = None
    """The last line that it wrote to stderr."""
    said: tuple[int, int] | None = None
    """Bytes that it wrote to stdout and stderr, if that is known; without those over its cap."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to run, in the domain that the record names. `start_by`, `stop_after`: moments of CLOCK_BOOTTIME."""

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
    files: Mapping[str, Path] = {}
    """What goes into `input/` of its work folder: relative names, and where to copy them from."""
    pipeline: Staging | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a container gets whose job does not say."""

    memory: str = "1g"
    cpus: float = 1.0
    pids: int = 256


class CannotStart(Exception):
    """The order cannot be carried out; nothing runs. `code` says whether another attempt would meet the same."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = Error(code=code, message=message)


class TooLate(Exception):
    """The deadline for the start has passed; nothing runs."""


class EngineUnreachable(Exception):
    """The engine does not answer, or is another one than before: nothing is known of the attempt, and nothing lost."""


State = Literal["missing", "running", "exited", "died", "forbidden"]
"""`forbidden`: nothing ran, and somebody saw to it that nothing will."""
Confirm = Callable[[], Awaitable[None]]
"""Asks the record whether the attempt is still ours, just before something starts; raises if it is not."""


class Running(Protocol):
    """One attempt under its supervisor, whoever started it."""

    @property
    def space(self) -> Path:
        """Where this worker finds what the tasks of a pipeline work on."""

    async def frames(self, most: int) -> Sequence[Frame]:
        """Return the next whole frames of its log; none if there is nothing new."""

    async def tell(self, command: Command) -> str:
        """Leave a command and return the name by which an `ack` answers."""

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` on this loop when it ends; `over` is looked at now and then all the same."""

    @property
    def over(self) -> bool:
        """Say whether its supervisor is gone."""

    def tell_now(self, command: Command) -> None:
        """Leave a command from any thread, without waiting."""

    async def collect(self) -> End | None:
        """Say how it ended. None: what is left of it could not be killed."""

    async def outputs(self, gathered: Gathered) -> None:
        """Hand over what it left under `output/`, and its `result.json`."""

    async def secrets(self) -> Sequence[str]:
        """The values that it was given, to be masked in what it says."""

    def close(self) -> None:
        """Let go of it; it runs on."""

    async def remove(self, *, others_held_it: bool) -> None:
        """Remove what it left on disk, once its end is in the record."""


class Runner(Protocol):
    """How attempts of one capability execute. `domains` are where it can find attempts; new ones start in `domain`.

    An engine may come and go: while it is away, there are no domains. Whatever needs it raises EngineUnreachable then.
    """

    capability: str

    @property
    def domain(self) -> str: ...

    @property
    def domains(self) -> Sequence[str]: ...

    @property
    def away(self) -> str | None:
        """Say why no attempt can start now, in words for people; None: it can."""

    def doubt(self) -> None:
        """Somebody met an engine that does not answer, or a host that is exhausted: nothing starts here for now."""

    async def watch(self, changed: Callable[[], None]) -> None:
        """Look after the engine for as long as the worker lives; call `changed` when it came, went or was replaced."""

    async def digest(self, spec: Mapping[str, Any], domain: str) -> str | None:
        """Say what exactly an image's name stands for here; None where there are no images."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Wait until it is our turn to start: what an engine cannot do at once is not asked of it at once."""

    async def start(self, order: Order, confirm: Confirm) -> Running:
        """Start an attempt; one that is there already is found, not started again."""

    async def find(self, identity: Identity, domain: str, *, stdout: int, stderr: int) -> tuple[State, Running]:
        """Look for an attempt in the domain where it was started; its log is then read from these offsets on."""

    async def forbid(self, identity: Identity, domain: str) -> bool:
        """See to it that an attempt never starts, whoever is on the way to it; False if it has started."""

    async def left_over(self) -> Sequence[Identity]:
        """Return the attempts of this installation that are here, whatever became of them."""

    def to_sweep(self, over: Sequence[Identity], found: int) -> Sequence[Identity]:
        """Return which of these to remove: of so many that are here, the record says that they are over."""

    async def sweep(self, identity: Identity) -> bool:
        """Remove what is left of an attempt whose end is in the record; stop it first if it runs. Say if it is gone."""

    async def sweep_halves(self, older: float) -> int:
        """Remove what was never finished being made, and is older than so many seconds; return how many."""
