"""The descriptor of the runner `script`. It is light: servers import it to check jobs, without the runner itself."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.descriptors import RunnerDescriptor
from holdfast.limits import NAMES
from holdfast.runner_specs import Name, Text
from holdfast.spec_checks import Memory, Pids

Script = Annotated[str, Meta(min_length=1, max_length=65_536)]


class ScriptSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a job says: a text, its reader, arguments, and the same limits as a process."""

    script: Script
    reader: Literal["sh", "python3"] = "sh"
    arguments: Annotated[list[Text], Meta(max_length=100)] = []
    env: dict[Name, Text] = {}
    memory: Memory | None = None
    pids: Pids | None = None
    require_result: bool = False


SCRIPT = RunnerDescriptor(
    name="script",
    spec=ScriptSpec,
    build="holdfast_script.runner:build",
    # It is privileged, since nothing else is said: a script is a command. Where HOLDFAST_ALLOW_RAW lets every caller
    # bring one, these are the fields that they may set; the limits are for admins and tools, or up to their ceilings.
    open_fields=frozenset({"script", "reader", "arguments", "env", "require_result"}),
    limits=NAMES,
)
