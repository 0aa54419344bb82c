"""The defaults of a function's jobs: which fields they may set, whose hold, and the lane that a template gives.

A function's decorator says them. Workers register them with a revision, and every way of submitting uses them; the
caller's own application knows them, too. On Postgres the same rules are in `with_defaults` and `function_lane`
(sql/postgres/repeatable/submit.sql).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from holdfast.errors import Invalid

FIELDS = (
    *("queue", "lane", "priority", "labels", "max_attempts", "retry", "on_lost", "timeout", "queue_timeout"),
    *("idle_timeout", "stop_grace", "stop_after", "budget", "secrets"),
)
"""The fields of a submission that a function may have defaults for."""
LONGEST_LANE = 200
_INPUT = re.compile(r"\{([^{}]*)\}")
_PATH = re.compile(r"[^\W\d]\w*(\.\w+)*")


class FunctionDefaults(msgspec.Struct, frozen=True):
    """What a decorator says, and its revision."""

    defaults: Mapping[str, Any] = {}
    revision: int = 0


def newer(own: FunctionDefaults | None, registered: FunctionDefaults | None) -> Mapping[str, Any]:
    """Return the defaults that hold, whole: those with the higher revision; of equal ones, the registered."""
    if registered is None or (own is not None and own.revision > registered.revision):
        return {} if own is None else own.defaults
    return registered.defaults


def of_job(defaults: Mapping[str, Any], function: str, job_inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the defaults for one job: its lane is no longer a template."""
    template = defaults.get("lane")
    if template is None or "{" not in template:
        return defaults
    return {**defaults, "lane": function_lane(template, function, job_inputs)}


def function_lane(template: str, function: str, job_inputs: Mapping[str, Any]) -> str:
    """Return the lane of one job: `{name}` is the input of that name, `{order.customer}` a part of one."""
    lane = _INPUT.sub(lambda found: _text(found[1], template, function, job_inputs), template)
    if not 1 <= len(lane) <= LONGEST_LANE or not lane.isprintable():
        raise Invalid("lane", f"{template} of function {function} gives an empty, too long or unprintable name")
    return lane


def _text(path: str, template: str, function: str, job_inputs: Mapping[str, Any]) -> str:
    found: Any = job_inputs
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    if isinstance(found, str) or (isinstance(found, int) and not isinstance(found, bool)):
        return str(found)
    raise Invalid("lane", f"{template} of function {function} needs the input {path}: a text or a whole number")


def check_template(template: str, required: Iterable[str]) -> None:
    """Refuse a template that a submit could not fill. `required` are the inputs that every job has."""
    paths = _INPUT.findall(template)
    rest = _INPUT.sub("", template)
    if "{" in rest or "}" in rest or not all(_PATH.fullmatch(path) for path in paths):
        raise Invalid("lane", f"{template!r} is not a template: write inputs as {{name}} or {{name.field}}")
    known = set(required)
    for path in paths:
        if path.split(".")[0] not in known:
            raise Invalid("lane", f"{template!r} names {path}, which is not an input that every job must have")
