"""Registered functions, and the context that they get when they run inside a worker.

A function's parameters are the job's inputs. A parameter annotated with `Context` gets the context: progress, log,
usage, and the cancel token, which tells the function to stop.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

import msgspec

from holdfast.catalogue import EVENTS, FREE
from holdfast.errors import ConfigError, Invalid
from holdfast.function_defaults import FIELDS, FunctionDefaults, check_template
from holdfast.model import FUNCTION, Json, NewEvent
from holdfast.runner.function_types import beyond_json, hints_of, read_inputs
from holdfast.submission import check_retry, parse
from holdfast.timing import LONGEST

P = ParamSpec("P")
R = TypeVar("R")
OURS = frozenset({*EVENTS, "end"}) - FREE
"""Types of events that only holdfast writes; `end` closes a stream."""
MAX_NAME = 64
MOST_USED = 1e12
"""Maximum of one amount in one usage report: sums of whole numbers stay exact on every database."""


class Cancelled(Exception):
    """Raised by `CancelToken.check` in a function that should stop."""


class RetryAsked(BaseException):
    """Ends a function that asked to run again. No Exception: `except Exception` in the function must not catch it."""

    def __init__(self, after: float | None, reason: str | None) -> None:
        super().__init__(reason or "the function asked for a retry")
        self.after = after


class CancelToken:
    """Tells a function that it should stop. Safe to use from any thread."""

    __slots__ = ("_event", "_loop", "_waiters", "reason")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._event: threading.Event | None = None
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []
        self.reason: str | None = None
        """Why: cancel, interrupt, timeout, idle_timeout, budget, drain or lost. None: continue."""

    @property
    def requested(self) -> bool:
        """Whether the function should stop."""
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
        """Add lines to the job's log."""
        safe = [str(line).encode("utf-8", "replace").decode() for line in lines]
        self._emit(NewEvent(type="log", data={"stream": "stdout", "lines": safe}))

    def progress(self, percent: float | None = None, message: str | None = None, **more: Json) -> None:
        """Report progress: a percentage, a message, or values of your own."""
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

    def retry(self, *, after: float | None = None, reason: str | None = None) -> NoReturn:
        """End this attempt and run again in `after` seconds, without it after the job's backoff.

        The attempt counts: without one left, the job fails with the reason. `Retry(on=…)` is not asked.
        """
        if after is not None and not 0 <= after <= LONGEST:
            raise Invalid("after", f"{after!r} is not a number of seconds between 0 and {LONGEST}")
        raise RetryAsked(after, reason)

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


class RegisteredFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A registered function, and the defaults of its jobs."""

    name: str
    call: Callable[..., Any]
    defaults: Mapping[str, Any] = {}
    """By field of a submission; `lane` may be a template."""
    revision: int = 0
    exceptions: tuple[type[BaseException], ...] = ()
    """The exceptions after which another attempt may help; none named: any."""
    capture_logs: bool = True
    """Whether what it logs with `logging` goes to the job's log."""
    is_async: bool = False
    context: str | None = None
    parameters: inspect.Signature = inspect.Signature()
    types: Mapping[str, Any] = {}
    """The parameters whose types say more than JSON does."""
    returns: Any = Any
    """The type of its result, if that says more than JSON does."""
    plain: bool = False

    @property
    def registration(self) -> FunctionDefaults:
        return FunctionDefaults(self.defaults, self.revision)

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a job's inputs as arguments, read by the types of the parameters. Raise ValueError for a misfit."""
        names = dict(inputs)
        if self.context is not None:
            if self.context in names:
                raise ValueError(f"{self.context} is the context, not an input")
            names[self.context] = None
        try:
            self.parameters.bind(**names)
        except TypeError as error:
            raise ValueError(str(error)) from None
        return read_inputs(inputs, self.types) if self.types else dict(inputs)

    def may_retry(self, error: BaseException) -> bool:
        return not self.exceptions or isinstance(error, self.exceptions)


class FunctionRegistry:
    """The functions that an application registered, by name."""

    def __init__(self) -> None:
        self._named: dict[str, RegisteredFunction] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._named)

    @property
    def all(self) -> list[RegisteredFunction]:
        return [self._named[name] for name in self.names]

    def get(self, name: str) -> RegisteredFunction | None:
        return self._named.get(name)

    def of(self, call: Callable[..., Any]) -> RegisteredFunction | None:
        """Return the registration of a function."""
        return next((function for function in self._named.values() if function.call is call), None)

    @overload
    def add(self, call: Callable[P, R]) -> Callable[P, R]: ...
    @overload
    def add(
        self,
        *,
        name: str | None = None,
        revision: int = 0,
        exceptions: tuple[type[BaseException], ...] = (),
        capture_logs: bool = True,
        **defaults: Any,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    def add(
        self,
        call: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        revision: int = 0,
        exceptions: tuple[type[BaseException], ...] = (),
        capture_logs: bool = True,
        **defaults: Any,
    ) -> Callable[..., Any]:
        """Register a function, as a decorator with or without arguments. It stays callable as it was."""

        def register(call: Callable[P, R]) -> Callable[P, R]:
            own_name = name or str(getattr(call, "__name__", ""))
            if own_name in self._named:
                raise ConfigError([f"two functions are called {own_name!r}: give one of them another name"])
            given = {field: value for field, value in defaults.items() if value is not None}
            function = _registered(call, own_name, given, revision)
            self._named[own_name] = msgspec.structs.replace(function, exceptions=exceptions, capture_logs=capture_logs)
            return call

        return register if call is None else register(call)


def _registered(call: Callable[..., Any], name: str, defaults: dict[str, Any], revision: int) -> RegisteredFunction:
    if not name or len(name) > 200:
        raise ConfigError([f"a function's name has 1 to 200 characters, not {name!r}"])
    if not 0 <= revision < 2**63:
        raise ConfigError([f"function {name}: revision is {revision}; it counts from 0"])
    signature = inspect.signature(call)
    hints = hints_of(call)
    context = next((n for n, p in signature.parameters.items() if Context in (hints.get(n), p.annotation)), None)
    given = [parameter for parameter in signature.parameters.values() if parameter.name != context]
    positional = [one.name for one in given if one.kind is one.POSITIONAL_ONLY and one.default is one.empty]
    if positional:
        raise ConfigError(
            [f"function {name}: parameter {positional[0]} is positional-only, but inputs are passed by name"]
        )
    named = [one for one in given if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    _check_defaults(name, defaults, [one.name for one in named if one.default is one.empty])
    returns = hints.get("return", Any)
    return RegisteredFunction(
        name=name,
        call=call,
        defaults=defaults,
        revision=revision,
        is_async=inspect.iscoroutinefunction(call),
        context=context,
        parameters=signature,
        types={one.name: hints[one.name] for one in named if one.name in hints and beyond_json(hints[one.name])},
        returns=returns if beyond_json(returns) else Any,
        plain=not signature.parameters,
    )


def _check_defaults(name: str, defaults: Mapping[str, Any], required: list[str]) -> None:
    """Refuse defaults that no submit could use."""
    try:
        for field in defaults:
            if field not in FIELDS:
                raise Invalid(field, f"is not a default of a function; those are {', '.join(FIELDS)}")
        check_retry(parse({"runner": FUNCTION, "spec": {"name": name}, **defaults}).retry)
        check_template(defaults.get("lane", ""), required)
    except Invalid as error:
        raise ConfigError([f"function {name}: {error.message}"]) from None
