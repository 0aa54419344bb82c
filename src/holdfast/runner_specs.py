"""The check of a spec, as a caller writes it, and the types that specs of several runners use.

A spec says what a job runs: the name of a function, a command, an image, or the tasks of a pipeline. Its type is in
the descriptor of its runner.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast import decoding
from holdfast.errors import Invalid
from holdfast.pipeline_spec import PIPELINE_FIELDS, PipelineSpec, refuse_odd_tasks
from holdfast.registry import connector_named, runner_named, runners
from holdfast.spec_checks import check_values
from holdfast.timing import LONGEST

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST)]
Text = Annotated[str, Meta(max_length=32_768)]


def check_spec(runner: str, spec: Mapping[str, Any]) -> None:
    """Check what a job wants to run. A submit by SQL does not check this; the worker then does."""
    descriptor = runner_named(runner)
    kind: type[msgspec.Struct] | None = descriptor.pipeline if "tasks" in spec else descriptor.spec
    if kind is None:
        able = " or ".join(one.name for one in runners().values() if one.pipeline is not None)
        raise Invalid("tasks", f"a pipeline runs as {able}, not as {runner}")
    try:
        checked = decoding.convert(spec, kind)
    except msgspec.ValidationError as error:
        raise _as_written(invalid_field(error, root="spec")) from None
    check_values(spec)
    if isinstance(checked, PipelineSpec):
        refuse_odd_tasks(checked, sql=connector_named(checked.connector).sql)


def capability_of(runner: str, spec: Mapping[str, Any]) -> str:
    """Return the capability that a worker needs for a job; of a runner that is not installed here, its name."""
    descriptor = runners().get(runner)
    return runner if descriptor is None else descriptor.capability(spec)


def _as_written(error: Invalid) -> Invalid:
    """Name a pipeline's field as the caller wrote it, beside the spec."""
    inner = error.field.removeprefix("spec.")
    if re.split(r"[.\[]", inner)[0] in PIPELINE_FIELDS:
        return Invalid(inner, error.message.removeprefix(f"{error.field}: "))
    return error


def invalid_field(error: msgspec.ValidationError, root: str = "") -> Invalid:
    """Take the field out of a message like "Expected `int`, got `str` - at `$.priority`"."""
    text = str(error)
    at = re.search(r" - at (?:`key` in )?`\$\.?(.*?)`$", text)
    path = at.group(1) if at else ""
    text = text[: at.start()] if at else text
    named = re.search(r"(?:unknown|required) field `([^`]+)`", text)
    if named:
        path = f"{path}.{named.group(1)}" if path else named.group(1)
    field = ".".join(part for part in (root, path) if part) or "job"
    return Invalid(field, text)
