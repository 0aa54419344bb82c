"""The descriptor of the Docker runner."""

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.descriptors import RunnerDescriptor
from holdfast.limits import FILES
from holdfast.pipeline_spec import PIPELINE_FIELDS, PipelineSpec
from holdfast.runner_specs import Name, Text
from holdfast.spec_checks import Cpus, Memory, Pids


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


class DockerPipelineSpec(PipelineSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    image: Name
    memory: Memory | None = None
    cpus: Cpus | None = None
    pids: Pids | None = None
    file_size: Memory | None = None
    folder_size: Memory | None = None
    network: Name | None = None
    user: Name | None = None


DOCKER = RunnerDescriptor(
    name="docker",
    spec=DockerSpec,
    pipeline=DockerPipelineSpec,
    build="holdfast.runner.docker.build:build",
    open_fields=frozenset({"image", "command", "env", "require_result", *PIPELINE_FIELDS}),
    limits=FILES,
)
