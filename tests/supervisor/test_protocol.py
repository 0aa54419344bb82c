"""The names that Python and the supervisor share: Python writes all of them, and C handles all of them."""

from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import pytest

from holdfast.runner.supervisor import build, protocol
from holdfast.runner.supervisor.protocol import CommandKey, ProgramKey, SpecKey, TaskKey
from holdfast.runner.wire import Command, SupervisorSpec, WireService, WireTask, encode_command, encode_spec

PROGRAM: dict[str, Any] = {"argv": ("true",), "env": {"A": "b"}, "cwd": "/"}
FULL_SPEC = SupervisorSpec(
    token=1,
    mark="mark",
    tasks=(WireTask(name="task", timeout=1.0, **PROGRAM),),
    env={"A": "b"},
    cwd="/",
    uid=1,
    gid=1,
    groups=(1,),
    sole_user=True,
    private=True,
    limits={"core": 0},
    output_cap=1,
    timeout=1.0,
    idle_timeout=1.0,
    start_by=1.0,
    stop_after=1.0,
    hold=True,
    service=WireService(name="service", **PROGRAM),
)
FULL_COMMAND = Command(
    token=1, verb="stop", kind="fail", grace=1.0, stop_after=1.0, task=0, name="name", text="it failed"
)


def keys_in(data: bytes) -> set[str]:
    """Return the keys of records whose values have no newline."""
    _, *lines = data.decode().split("\n")
    return {line.split(" ")[0] for line in lines[::2] if line} - {"end"}


def test_a_full_spec_has_every_key() -> None:
    assert keys_in(encode_spec(FULL_SPEC)) == {*get_args(SpecKey), *get_args(ProgramKey), *get_args(TaskKey)}


def test_a_full_command_has_every_key() -> None:
    assert keys_in(encode_command(FULL_COMMAND)) == set(get_args(CommandKey))


@pytest.mark.skipif(build.system_compiler() is None, reason="no C compiler here that links statically")
@pytest.mark.parametrize("words", ["SpecKey", "TaskKey", "CommandKey", "Verb", "Limit"])
def test_a_name_that_c_does_not_handle_breaks_the_build(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = ModuleType("protocol")
    longer.__dict__.update(vars(protocol))
    longer.__dict__[words] = Literal[(*get_args(getattr(protocol, words)), "unheard_of")]
    monkeypatch.setattr(build, "_protocol", lambda: longer)
    monkeypatch.setattr(build, "zig_compiler", lambda: None)
    monkeypatch.setattr(build, "HARDENING", build.HARDENING[-1:])
    with pytest.raises(build.BuildFailed, match=r"of protocol\.py is missing"):
        build.build(tmp_path / "program")
