"""The specs of the runners, as a caller writes them, and their check.

A spec says what a job runs: the name of a function, a command, an image, or the tasks of a pipeline.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast import decoding
from holdfast.errors import Invalid
from holdfast.model import RunnerName
from holdfast.pipeline_spec import PIPELINE_FIELDS, PipelineSpec, refuse_odd_tasks
from holdfast.spec_checks import Cpus, Memory, Pids, check_values
from holdfast.timing import LONGEST

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST)]
Text = Annotated[str, Meta(max_length=32_768)]


class FunctionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: Annotated[list[Text], Meta(min_length=1, max_length=4096)]
    env: dict[Name, Text] = {}
    stdin: str | None = None
    user: Name | None = None
    memory: Memory | None = None
    pids: Pids | None = None
    file_size: Memory | None = None
    folder_size: Memory | None = None
    require_result: bool = False


class DockerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    image: Name
    command: Annotated[list[Text], Meta(max_length=4096)] | None = None
    env: dict[Name, Text] = {}
    memory: Memory | None = None
    cpus: Cpus | None = None
    pids: Pids | None = None
    file_size: Memory | None = None
    folder_size: Memory | None = None
    network: Name | None = None
    user: Name | None = None
    require_result: bool = False


class ProcessPipelineSpec(PipelineSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    user: Name | None = None
    memory: Memory | None = None
    pids: Pids | None = None
    file_size: Memory | None = None
    folder_size: Memory | None = None


class DockerPipelineSpec(PipelineSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    image: Name
    memory: Memory | None = None
    cpus: Cpus | None = None
    pids: Pids | None = None
    file_size: Memory | None = None
    folder_size: Memory | None = None
    network: Name | None = None
    user: Name | None = None


SPECS: Mapping[RunnerName, type[msgspec.Struct]] = {
    "function": FunctionSpec,
    "process": ProcessSpec,
    "docker": DockerSpec,
}
PIPELINES: Mapping[str, type[PipelineSpec]] = {"process": ProcessPipelineSpec, "docker": DockerPipelineSpec}


def check_spec(runner: RunnerName, spec: Mapping[str, Any]) -> None:
    """Check what a job wants to run. A submit by SQL does not check this; the worker then does."""
    pipeline = "tasks" in spec
    if pipeline and runner not in PIPELINES:
        raise Invalid("tasks", f"a pipeline runs as process or docker, not as {runner}")
    kind = PIPELINES[runner] if pipeline else SPECS[runner]
    try:
        checked = decoding.convert(spec, kind)
    except msgspec.ValidationError as error:
        raise _as_written(invalid_field(error, root="spec")) from None
    check_values(spec)
    if isinstance(checked, PipelineSpec):
        refuse_odd_tasks(checked)


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
