"""The descriptor of the process runner."""

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.descriptors import RunnerDescriptor
from holdfast.limits import NAMES
from holdfast.pipeline_spec import PIPELINE_FIELDS, PipelineSpec
from holdfast.runner_specs import Name, Text
from holdfast.spec_checks import Memory, Pids


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


class ProcessPipelineSpec(PipelineSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    user: Name | None = None
    memory: Memory | None = None
    pids: Pids | None = None
    file_size: Memory | None = None
    folder_size: Memory | None = None


PROCESS = RunnerDescriptor(
    name="process",
    spec=ProcessSpec,
    pipeline=ProcessPipelineSpec,
    build="holdfast.runner.process:build",
    open_fields=frozenset({"command", "env", "stdin", "require_result", *PIPELINE_FIELDS}),
    limits=NAMES,
    host_users=True,
)
