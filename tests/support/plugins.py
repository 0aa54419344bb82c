"""Distributions with runners and connectors of their own, as `pip install` leaves them in a folder."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast import registry
from holdfast.pipeline.connectors import connector_of

RUNNER = """
import msgspec
from holdfast.descriptors import RunnerDescriptor
from holdfast.runner.process import ProcessRunner, build_kind

class Spec(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    loud: bool = False

class Runner(ProcessRunner):
    capability = "NAME"

    def command(self, spec):
        return ("sh", "-c", spec["text"])

async def build(host):
    return build_kind(Runner, host)

DESCRIPTOR = RunnerDescriptor(name="NAME", spec=Spec, build="MODULE:build", MORE)
"""


def runner_module(name: str, more: str = "") -> Mapping[str, str]:
    """A module `NAME_runner` with a runner that gives its text to a shell, and more fields of its descriptor."""
    module = f"{name}_runner"
    text = RUNNER.replace("MODULE", module).replace("NAME", name).replace("MORE", more)
    return {f"{module}.py": text}


def distribution(
    folder: Path,
    name: str,
    entries: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
    *,
    group: str = registry.RUNNERS,
) -> None:
    """Write a distribution with entry points, and its modules."""
    about = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = [f"{entry} = {where}" for entry, where in entries.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    for file, text in (modules or {}).items():
        (folder / file).write_text(text)


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Import from a folder, and read the registry again, while the block lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        _forget()
        try:
            yield
        finally:
            for module in folder.glob("*.py"):
                sys.modules.pop(module.stem, None)
            _forget()


def _forget() -> None:
    for loaded in (registry.runners, registry.connectors, connector_of):
        loaded.cache_clear()
