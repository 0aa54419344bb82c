"""Fields that give a job more than the default: only admins, and tools that an operator defines, may set them.

Every field of every spec is in one of the tables below, and a test fails for one that is in none. No role is enough
to run as root: that needs HOLDFAST_ALLOW_ROOT_JOBS. The worker checks it again, because it resolves user names.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import FieldForbidden
from holdfast.pipeline_spec import PIPELINE_FIELDS
from holdfast.spec_checks import memory_bytes

RUNS = frozenset({"command", "env", "require_result", *PIPELINE_FIELDS})
OPEN: Mapping[str, frozenset[str]] = {
    "function": frozenset({"name"}),
    "process": RUNS | {"stdin"},
    "docker": RUNS | {"image"},
}
"""Fields that every caller who may submit such a job may set."""
PRIVILEGED = frozenset({"user", "network", "memory", "cpus", "pids", "file_size", "folder_size"})
"""Fields that give a job more than the default; amounts only above a ceiling, or 0, which removes a limit."""
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
    if not isinstance(spec, Mapping) or not isinstance(runner, str) or runner not in OPEN:
        return  # Not a job: the check of its types reports that.
    for field, value in spec.items():
        if value is None or field in OPEN[runner] or field not in PRIVILEGED:
            continue
        why = _why(field, value, ceilings.get((runner, field)))
        if why is not None:
            raise FieldForbidden(f"spec.{field}", f"{why}; {REMEDY}")


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
