"""Registered functions, and the context that they get when they run inside a worker.

A function's parameters are the job's inputs. A parameter annotated with `Context` gets the context: progress, log,
usage, and the cancel token, which tells the function to stop.
"""

import asyncio
import inspect
import threading
import typing
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, overload

import msgspec

from holdfast.catalogue import EVENTS, FREE
from holdfast.errors import ConfigError, Invalid
from holdfast.model import Json, NewEvent

P = ParamSpec("P")
R = TypeVar("R")
OURS = frozenset({*EVENTS, "end"}) - FREE
"""Types of events that only holdfast writes; `end` closes a stream."""
MAX_NAME = 64
MOST_USED = 1e12
"""Maximum of one amount in one usage report: sums of whole numbers stay exact on every database."""


class Cancelled(Exception):
    """Raised by `CancelToken.check` in a function that should stop."""


class CancelToken:
    """Tells a function that it should stop. Safe to use from any thread."""

    __slots__ = ("_event", "_loop", "_waiters", "reason")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._event: threading.Event | None = None
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []
        self.reason: str | None = None
        """Why: cancel, interrupt, timeout, idle_timeout, budget, drain or lost. None: go on."""

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def check(self) -> None:
        """Raise `Cancelled` if the function should stop."""
        if self.reason is not None:
            raise Cancelled(self.reason)

    def wait(self, timeout: float | None = None) -> bool:
        """Block a sync function until it should stop, or until the timeout. Return whether it should stop."""
        if self._event is None:
            self._event = threading.Event()
        if self.reason is None:
            self._event.wait(timeout)
        return self.requested

    async def requested_async(self) -> None:
        """Wait in an async function until it should stop."""
        if self.reason is None:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def _set(self, reason: str) -> None:
        """Set the reason, on the worker's loop. The first reason stays."""
        if self.reason is not None:
            return
        self.reason = reason
        if self._event is not None:
            self._event.set()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class Context:
    """What a function gets in addition to its inputs. All methods may be called from any thread."""

    __slots__ = ("_emit", "attempt", "cancel", "job_id", "secrets", "tenant", "token")

    def __init__(
        self,
        *,
        job_id: str,
        tenant: str,
        attempt: int,
        token: int,
        cancel: CancelToken,
        emit: Callable[[NewEvent], None],
        secrets: Mapping[str, str] = {},
    ) -> None:
        self.job_id = job_id
        self.tenant = tenant
        self.attempt = attempt
        self.token = token
        """The lease's token: pass it on to fence side effects."""
        self.cancel = cancel
        self.secrets = secrets
        """The secrets that the job names. They are masked in its output, result and errors."""
        self._emit = emit

    def log(self, *lines: str) -> None:
        safe = [str(line).encode("utf-8", "replace").decode() for line in lines]
        self._emit(NewEvent(type="log", data={"stream": "stdout", "lines": safe}))

    def progress(self, percent: float | None = None, message: str | None = None, **more: Json) -> None:
        known = {"percent": percent, "message": message}
        self._emit_event("progress", {k: v for k, v in known.items() if v is not None} | more)

    def usage(self, **deltas: float) -> None:
        """Report usage since the last report. A job that exceeds its budget is stopped."""
        for name, value in deltas.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_USED:
                raise Invalid(name, f"{value!r} is not a number between 0 and {MOST_USED:g}")
            if len(name) > MAX_NAME or not name.isprintable():
                raise Invalid("usage", f"{name[:MAX_NAME]!r} is not a name of at most {MAX_NAME} printable characters")
        self._emit_event("usage", deltas)

    def event(self, type: str, **data: Json) -> None:
        """Add an event with a name of your own to the job's history."""
        if type in OURS:
            raise Invalid("type", f"{type} events are written by holdfast alone; use another name")
        if not 0 < len(type) <= MAX_NAME or not type.isprintable():
            raise Invalid("type", f"{type[:MAX_NAME]!r} is not a name of 1 to {MAX_NAME} printable characters")
        self._emit_event(type, data)

    def _emit_event(self, type: str, data: Json) -> None:
        """Emit an event; raise here, in the function, if its data is not valid JSON."""
        try:
            msgspec.json.encode(data)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise Invalid("data", f"cannot be written as JSON ({error})") from None
        self._emit(NewEvent(type=type, data=data))


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A registered function, and the defaults of its jobs."""

    name: str
    call: Callable[..., Any]
    queue: str = "default"
    timeout: float | None = None
    revision: int = 0
    is_async: bool = False
    context: str | None = None
    parameters: inspect.Signature = inspect.Signature()
    plain: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of its jobs, by field of a submission."""
        said = {"queue": None if self.queue == "default" else self.queue, "timeout": self.timeout}
        return {name: value for name, value in said.items() if value is not None}

    def arguments(self, inputs: Mapping[str, Any]) -> str | None:
        """Return why a job's inputs do not fit as arguments of this function, or None."""
        names = dict(inputs)
        if self.context is not None:
            if self.context in names:
                return f"{self.context} is the context, not an input"
            names[self.context] = None
        try:
            self.parameters.bind(**names)
        except TypeError as error:
            return str(error)
        return None


class FunctionRegistry:
    """The functions that an application registered, by name."""

    def __init__(self) -> None:
        self._named: dict[str, Function] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._named)

    @property
    def all(self) -> list[Function]:
        return [self._named[name] for name in self.names]

    def get(self, name: str) -> Function | None:
        return self._named.get(name)

    def of(self, call: Callable[..., Any]) -> Function | None:
        """Return the registration of a function."""
        return next((function for function in self._named.values() if function.call is call), None)

    @overload
    def add(self, call: Callable[P, R]) -> Callable[P, R]: ...
    @overload
    def add(
        self, *, name: str | None = None, queue: str = "default", timeout: float | None = None, revision: int = 0
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    def add(
        self,
        call: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        queue: str = "default",
        timeout: float | None = None,
        revision: int = 0,
    ) -> Callable[..., Any]:
        """Register a function, as a decorator with or without arguments. It stays callable as it was."""

        def register(call: Callable[P, R]) -> Callable[P, R]:
            function = _function(call, name or str(getattr(call, "__name__", "")), queue, timeout, revision)
            if function.name in self._named:
                raise ConfigError([f"two functions are called {function.name!r}: give one of them another name"])
            self._named[function.name] = function
            return call

        return register if call is None else register(call)


def _function(call: Callable[..., Any], name: str, queue: str, timeout: float | None, revision: int) -> Function:
    if not name or len(name) > 200:
        raise ConfigError([f"a function's name has 1 to 200 characters, not {name!r}"])
    if timeout is not None and not timeout > 0:
        raise ConfigError([f"function {name}: timeout is {timeout}; it must be above 0"])
    signature = inspect.signature(call)
    try:
        hints = typing.get_type_hints(call)
    except Exception:
        hints = {}
    context = next((n for n, p in signature.parameters.items() if Context in (hints.get(n), p.annotation)), None)
    positional = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty
    ]
    if positional:
        raise ConfigError(
            [f"function {name}: parameter {positional[0]} is positional-only, but inputs are passed by name"]
        )
    return Function(
        name=name,
        call=call,
        queue=queue,
        timeout=timeout,
        revision=revision,
        is_async=inspect.iscoroutinefunction(call),
        context=context,
        parameters=signature,
        plain=not signature.parameters,
    )
