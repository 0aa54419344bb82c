"""The descriptor of functions, which the worker itself runs: on its event loop, or in a thread."""

import msgspec

from holdfast.descriptors import RunnerDescriptor
from holdfast.runner_specs import Name


class FunctionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name


FUNCTION = RunnerDescriptor(
    name="function",
    spec=FunctionSpec,
    build=None,
    privileged=False,
    open_fields=frozenset({"name"}),
    adoptable=False,
    work_folder=False,
    named_by="name",
)
