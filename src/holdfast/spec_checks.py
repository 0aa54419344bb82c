"""Values in a spec that a type alone accepts and no host can use: refused at submit, not at the start.

The worker checks them again, since a job that was submitted over SQL passed no check.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from msgspec import Meta

from holdfast.errors import Invalid

MOST_ID = 2**32 - 2
"""User and group ids; the one above means "no change" to the kernel."""
MOST_MEMORY = 2**50
UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}

Cpus = Annotated[float, Meta(ge=0.01, le=4096)]
"""An engine takes hundredths; below that, its own unit rounds to 0, which lifts the limit."""
Pids = Annotated[int, Meta(ge=1, le=2**22)]
Memory = Annotated[str, Meta(pattern=r"^[0-9]{1,18}[kmgKMG]?$")]


def check_values(spec: Mapping[str, Any]) -> None:
    """Refuse a user, an amount of memory, or names in an environment that can only fail at the start."""
    if spec.get("user") is not None:
        _check_user("spec.user", spec["user"])
    if spec.get("memory") is not None:
        _check_memory("spec.memory", spec["memory"])
    check_names("spec.env", spec.get("env") or ())
    for n, task in enumerate(spec.get("tasks") or ()):
        check_names(f"tasks[{n}].env", task.get("env") or ())


def check_names(field: str, names: Iterable[str]) -> None:
    """Names of an environment: what stands before the first `=` of an entry, in one line."""
    for name in names:
        if "=" in name or not name.isprintable():
            raise Invalid(field, f"{name[:60]!r} is no name for a variable: it has an = or a control character")


def _check_user(field: str, user: str) -> None:
    if not user.isprintable():
        raise Invalid(field, "has control characters")
    for part in user.split(":"):
        if part.isdecimal() and (not part.isascii() or len(part) > 10 or int(part) > MOST_ID):
            raise Invalid(field, f"{part[:20]} is no id of a user or group: at most {MOST_ID}")


def _check_memory(field: str, text: str) -> None:
    amount = int(text.rstrip("kmgKMG")) * UNITS.get(text[-1].lower(), 1)
    if amount > MOST_MEMORY:
        raise Invalid(field, f"{text} is more than any host has: at most {MOST_MEMORY} bytes")
