"""What a server refused, as the errors that a program on the database gets: `except NotFound` fits both."""

from functools import cache
from typing import Any

from holdfast import errors
from holdfast.errors import HoldfastError
from holdfast.model import Json


class Refused(HoldfastError):
    """The server refused the request: its status, code, message and details.

    It is also the error that its code stands for: `NotFound`, `Conflict`, `Invalid` (with `field`) and so on.
    """

    details: Json = None

    def __init__(self, status: int, code: str, message: str, details: Json = None) -> None:
        HoldfastError.__init__(self, message)
        self.status = status
        self.code = code
        self.details = details
        for name, value in details.items() if isinstance(details, dict) else ():
            if name not in ("status", "code", "message", "details"):
                setattr(self, name, value)


def refusal(status: int, code: str, message: str, details: Json = None) -> Refused:
    """Return the error of a refused request."""
    return _class_of(status, code)(status, code, message, details)


@cache
def _class_of(status: int, code: str) -> type[Refused]:
    kind = _kinds().get((status, code))
    return Refused if kind is None else type(kind.__name__, (Refused, kind), {"__doc__": kind.__doc__})


@cache
def _kinds() -> dict[tuple[int, str], type[HoldfastError]]:
    found: list[Any] = [one for one in vars(errors).values() if isinstance(one, type)]
    kinds = [one for one in found if issubclass(one, HoldfastError) and one is not HoldfastError]
    return {(kind.status, kind.code): kind for kind in kinds}
