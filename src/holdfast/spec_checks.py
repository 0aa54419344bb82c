"""Checks for spec values that fit their type but that no host can use: refused at submit, not at the start.

The worker checks them again, since a job that was submitted by SQL was not checked.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from msgspec import Meta

from holdfast.errors import Invalid

MOST_ID = 2**32 - 2
"""User and group ids; the one above means "no change" to the kernel."""
MOST_MEMORY = 2**50
UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}

Cpus = Annotated[float, Meta(ge=0.01, le=4096)]
"""An engine accepts hundredths; smaller values round to 0 in its unit, which removes the limit."""
Pids = Annotated[int, Meta(ge=1, le=2**22)]
MEMORY = r"[0-9]{1,18}[kmgKMG]?"
Memory = Annotated[str, Meta(pattern=f"^{MEMORY}$")]
USER = re.compile(r"[0-9]+(:[0-9]+)?|[A-Za-z0-9_][A-Za-z0-9_.@$\\-]*", re.ASCII)
"""A user is `uid`, `uid:gid` or a name; a name with a group after it would be read differently by each runner."""


def check_values(spec: Mapping[str, Any]) -> None:
    """Refuse a user, an amount of memory, or names in an environment that can only fail at the start."""
    if spec.get("user") is not None:
        _check_user("spec.user", spec["user"])
    for name in ("memory", "file_size", "folder_size"):
        if spec.get(name) is not None:
            _check_size(f"spec.{name}", spec[name])
    check_names("spec.env", spec.get("env") or ())
    for n, task in enumerate(spec.get("tasks") or ()):
        check_names(f"tasks[{n}].env", task.get("env") or ())


def check_names(field: str, names: Iterable[str]) -> None:
    """Refuse names of environment variables that contain an `=` or a control character."""
    for name in names:
        if "=" in name or not name.isprintable():
            raise Invalid(field, f"{name[:60]!r} is not a valid variable name: it has an = or a control character")


def _check_user(field: str, user: str) -> None:
    if not USER.fullmatch(user):
        raise Invalid(field, f"{user[:60]!r} is not a user: give a name, a uid, or uid:gid")
    for part in user.split(":"):
        if part.isdecimal() and (len(part) > 10 or int(part) > MOST_ID):
            raise Invalid(field, f"{part[:20]} is not a valid user or group id: at most {MOST_ID}")


def memory_bytes(text: str) -> int | None:
    """Return an amount of memory such as 512m in bytes; None if it is not one."""
    if not re.fullmatch(MEMORY, text):
        return None
    return int(text.rstrip("kmgKMG")) * UNITS.get(text[-1].lower(), 1)


def _check_size(field: str, text: str) -> None:
    amount = memory_bytes(text)
    if amount is None or amount > MOST_MEMORY:
        raise Invalid(field, f"{text} is more than any host has: at most {MOST_MEMORY} bytes")
