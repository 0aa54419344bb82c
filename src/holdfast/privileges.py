"""Fields that give a job more than the default: only admins, and tools that an operator defines, may set them.

A field is for every caller only if the descriptor of its runner says so. The built-in runners decide every field: a
test fails for one that is neither open there nor in the table below. No role is enough to run as root: that needs
HOLDFAST_ALLOW_ROOT_JOBS. The worker checks it again, because it resolves user names.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import FieldForbidden, Forbidden
from holdfast.registry import runners
from holdfast.spec_checks import memory_bytes

PRIVILEGED = frozenset({"user", "network", "memory", "cpus", "pids", "file_size", "folder_size"})
"""Fields that give a job more than the default; amounts only above a ceiling, or 0, which removes a limit."""
RAW = "need an admin's token or HOLDFAST_ALLOW_RAW; use a tool"
REMEDY = "use an admin's token, or a tool that sets it"
ROOT = "is root: name another user, or set HOLDFAST_ALLOW_ROOT_JOBS=true for the server and the workers"


class Ceiling(msgspec.Struct, frozen=True):
    """How much a job of a non-admin caller may ask for, and the setting that says so."""

    most: float
    setting: str


Ceilings = Mapping[tuple[str, str], Ceiling]
"""By runner and field."""


def refuse_privileged(runner: Any, spec: Any, ceilings: Ceilings) -> None:
    """Refuse a spec that asks for more than the default; the error names the field.

    A malformed value of such a field is refused as well, so that it cannot bypass the check.
    """
    descriptor = runners().get(runner) if isinstance(runner, str) else None
    if descriptor is None or not isinstance(spec, Mapping):
        return  # Not a job: the check of its types reports that.
    decided = descriptor.fields | PRIVILEGED
    for field, value in spec.items():
        if value is None or field in descriptor.open_fields or field not in decided:
            continue  # An unknown field is refused by the check of its types.
        why = _why(field, value, ceilings.get((runner, field)))
        if why is not None:
            raise FieldForbidden(f"spec.{field}", f"{why}; {REMEDY}")


def refuse_raw(runner: Any) -> None:
    """Refuse a job whose runner is privileged, as every runner is unless its descriptor says otherwise."""
    descriptor = runners().get(runner) if isinstance(runner, str) else None
    if descriptor is not None and descriptor.privileged:
        raise Forbidden(f"jobs of your own for runner {runner} {RAW}")


def _why(field: str, value: Any, ceiling: Ceiling | None) -> str | None:
    """Say why a value gives a job more than the default; None if it does not."""
    if field == "user":
        return "chooses whom the job runs as"
    if field == "network":
        return None if value == "none" else "gives the job a network"
    if ceiling is None:
        return "is not for every caller"
    amount = memory_bytes(value) if isinstance(value, str) else value
    if isinstance(amount, int | float) and not isinstance(amount, bool) and 0 < amount <= ceiling.most:
        return None
    most = f" and at most {ceiling.most:.15g} ({ceiling.setting})" if math.isfinite(ceiling.most) else ""
    return f"must be above 0{most}"


def refuse_root(spec: Any) -> None:
    """Refuse a user that is literally root. Other names may be root's too: the worker looks them up."""
    user = spec.get("user") if isinstance(spec, Mapping) else None
    if isinstance(user, str) and names_root(user):
        raise FieldForbidden("spec.user", f"{user[:60]!r} {ROOT}")


def names_root(user: str) -> bool:
    """Return whether a user or its group is root in any notation that some program accepts."""
    return any(part.strip() == "root" or _is_zero(part) for part in user.split(":"))


def _is_zero(text: str) -> bool:
    try:
        return int(text, 0) == 0
    except ValueError:
        return text.strip().isdigit() and not text.strip(" 0")
