"""`Function`: what `@app.function()` makes of a function. It is called as before, and can be submitted."""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from holdfast.client.builders import Call
from holdfast.client.options import JobOptions, checked
from holdfast.errors import Invalid
from holdfast.runner.function import RegisteredFunction
from holdfast.runner.function_types import to_json

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Function(Generic[P, T, R]):
    """A registered function. `R` is the type of its result; calling it runs it here, without a job.

    Options go through `with_options`, so that they never collide with the function's own arguments:

        await app.submit(play.with_options(priority=5, delay=30), target="crm", steps=[])
        await app.submit_many([play.call(target=name, steps=[]) for name in targets])
    """

    def __init__(self, registered: RegisteredFunction, options: JobOptions | None = None) -> None:
        functools.update_wrapper(self, registered.call)
        if registered.is_async and hasattr(inspect, "markcoroutinefunction"):  # From Python 3.12 on.
            inspect.markcoroutinefunction(self)
        self.registered = registered
        self.options = options or JobOptions()

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        called: T = self.registered.call(*arguments, **named)
        return called

    def __repr__(self) -> str:
        return f"<Function {self.registered.name}>"

    @property
    def name(self) -> str:
        """Its name among the workers."""
        return self.registered.name

    def with_options(self, **options: Unpack[JobOptions]) -> "Function[P, T, R]":
        """Return the same function with options for its jobs; they replace those of the same name."""
        merged: JobOptions = {**self.options, **options}
        return Function(self.registered, checked(merged))

    def call(self, **inputs: Any) -> Call[R]:
        """Return a job that calls it with these inputs, to be submitted. Raise Invalid if they do not fit."""
        call: Call[R] = Call(self.name, plain_inputs(self.registered, inputs), returns=self.registered.returns)
        call.options = self.options
        call.function = self.registered
        return call


class Decorator(Protocol):
    """What `app.function(…)` returns."""

    @overload
    def __call__(self, call: Callable[P, Coroutine[Any, Any, R]], /) -> Function[P, Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, call: Callable[P, R], /) -> Function[P, R, R]: ...


def plain_inputs(function: RegisteredFunction, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs as JSON, after a check that they fit the function."""
    try:
        plain: dict[str, Any] = to_json(inputs)
        function.arguments(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid("inputs", f"do not fit function {function.name}: {error}") from None
    return plain
