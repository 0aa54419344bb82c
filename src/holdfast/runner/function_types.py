"""Types of a function's inputs and result: dataclasses, msgspec structs, pydantic models, times, enums and the like.

A job's inputs and result are JSON. What an annotation says beyond JSON is read by it before the call, and a result that
is more than JSON is written as JSON after it. Plain annotations (`str`, `list[int]`, `dict[str, Any]`) are not checked,
and neither is a class that nothing here can read: its parameter gets the JSON as it is. pydantic is not imported: a
class is one of its models if it has `model_validate`.
"""

import collections.abc
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from holdfast import decoding

_PLAIN = frozenset({str, int, float, bool, types.NoneType, dict, list, object})
_PLAIN_OF = frozenset(
    {
        *(list, dict, typing.Union, types.UnionType, typing.Literal, collections.abc.Sequence),
        *(collections.abc.Mapping, collections.abc.MutableMapping, collections.abc.MutableSequence),
        *(collections.abc.Iterable, collections.abc.Collection),
    }
)


class _Unknown(Exception):
    """A class that nothing here can read."""


def hints_of(call: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function; none if one of them names something that does not exist."""
    try:
        return typing.get_type_hints(call, include_extras=True)
    except Exception:  # An annotation may be any expression.
        return {}


def beyond_json(kind: Any) -> bool:
    """Return whether an annotation says more than JSON does, so that a value is read by it."""
    if kind is Any or isinstance(kind, typing.TypeVar | str):
        return False
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return False
    if origin in _PLAIN_OF:
        return any(beyond_json(part) for part in typing.get_args(kind))
    return not any(kind is plain for plain in _PLAIN)


def from_json(value: Any, kind: Any) -> Any:
    """Read plain data by a type. Raise msgspec.ValidationError, with the path to what does not fit."""
    try:
        return decoding.convert(value, kind, dec_hook=_read)
    except (_Unknown, TypeError):
        return value


def to_json(value: Any) -> Any:
    """Write a value as plain data. Raise TypeError or ValueError for one that has no form in JSON."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    return msgspec.to_builtins(value, enc_hook=_write)


def read_inputs(given: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a job as a function's arguments. Raise ValueError that names the input."""
    read = dict(given)
    for name, kind in kinds.items():
        if name in read:
            try:
                read[name] = from_json(read[name], kind)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name}: {error}") from None
    return read


def _read(kind: Any, value: Any) -> Any:
    validate = getattr(kind, "model_validate", None)
    if validate is None:
        raise _Unknown
    try:
        return validate(value)
    except ValueError as error:
        raise ValueError(_in_short(error)) from error


def _in_short(error: ValueError) -> str:
    """Return what a pydantic error says, on one line, without the links to its documentation."""
    listed = getattr(error, "errors", None)
    if listed is None:
        return str(error)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in listed())


def _write(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if dump is None or isinstance(value, type):
        raise TypeError(f"a {type(value).__name__} has no form in JSON")
    return dump(mode="json")
