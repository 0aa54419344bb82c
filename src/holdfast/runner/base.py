"""What every runner answers: start, find, wait, stop, collect. It knows nothing of queues, leases or SQL.

An attempt has an identity that never changes: installation, job, attempt. By it a runner finds again what another
worker started; the token of the lease is no part of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from holdfast.model import Cause, Error, Json
from holdfast.runner.frames import Frame
from holdfast.runner.outputs import Gathered
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


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to run. `start_by` and `stop_after` are moments of CLOCK_BOOTTIME."""

    identity: Identity
    token: int
    spec: Mapping[str, Any]
    inputs: Json
    start_by: float
    timeout: float | None = None
    idle_timeout: float | None = None
    stop_grace: float = 5.0
    stop_after: float | None = None
    secrets: Mapping[str, str] = {}


class CannotStart(Exception):
    """The order cannot be carried out; nothing runs. `code` says whether another attempt would meet the same."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = Error(code=code, message=message)


class TooLate(Exception):
    """The deadline for the start has passed; nothing runs."""


State = Literal["missing", "running", "exited", "died"]


class Running(Protocol):
    """One attempt under its supervisor, whoever started it."""

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

    async def secrets(self) -> Mapping[str, str]:
        """The secrets that it was given, to be masked in what it says."""

    def close(self) -> None:
        """Let go of it; it runs on."""

    async def remove(self, *, others_held_it: bool) -> None:
        """Remove what it left on disk, once its end is in the record."""


class Runner(Protocol):
    """How attempts of one capability execute. `domains` are where it can find attempts; new ones start in `domain`."""

    capability: str
    domain: str
    domains: Sequence[str]

    async def start(self, order: Order) -> Running:
        """Start an attempt; one that is there already is found, not started again."""

    async def find(self, identity: Identity, *, stdout: int, stderr: int) -> tuple[State, Running]:
        """Look for an attempt; its log is then read from these offsets on."""
