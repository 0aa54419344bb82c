"""Reads JSON and plain data into structs, from any thread.

msgspec builds its description of a struct when a process first decodes one. Another thread that decodes the same struct
at that moment reads the unfinished description, and the process ends with a segmentation fault. So each type is
described here first, by one thread at a time. Code that reads structs does so through this module.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
DecHook = Callable[[Any, Any], Any]
"""Reads a value of a class that msgspec does not know."""
_lock = threading.Lock()
_decoders: dict[tuple[Any, bool], msgspec.json.Decoder[Any]] = {}


def decoder(kind: Any, *, strict: bool = True) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type, which any number of threads may use."""
    found = _decoders.get((kind, strict))
    if found is None:
        with _lock:
            found = _decoders.setdefault((kind, strict), msgspec.json.Decoder(kind, strict=strict))
    return found


@overload
def decode(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T: ...
@overload
def decode(data: bytes | bytearray | memoryview | str, kind: Any) -> Any: ...
def decode(data: bytes | bytearray | memoryview | str, kind: Any) -> Any:
    """Read JSON into a type. Raises what msgspec raises."""
    return decoder(kind).decode(data)


@overload
def convert(data: Any, kind: type[T], *, strict: bool = True, dec_hook: DecHook | None = None) -> T: ...
@overload
def convert(data: Any, kind: Any, *, strict: bool = True, dec_hook: DecHook | None = None) -> Any: ...
def convert(data: Any, kind: Any, *, strict: bool = True, dec_hook: DecHook | None = None) -> Any:
    """Read plain data, such as decoded JSON, into a type. Raises what msgspec raises."""
    decoder(kind, strict=strict)
    return msgspec.convert(data, kind, strict=strict, dec_hook=dec_hook)
