"""The runner `script`: the process runner with another spec, so that its attempts outlive their worker as well."""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.runner.process import ProcessRunner, build_kind
from holdfast.runner.runner_host import RunnerHost

READERS = {"sh": ("sh", "-e", "-c"), "python3": ("python3", "-c")}
"""What reads a script that follows as an argument."""


class ScriptRunner(ProcessRunner):
    capability = "script"

    def command(self, spec: Mapping[str, Any]) -> Sequence[str]:
        reader = spec.get("reader", "sh")
        # The first argument after the script of `sh -c` is its $0; Python's sys.argv[0] is "-c" anyway.
        name = ("script",) if reader == "sh" else ()
        return (*READERS[reader], spec["script"], *name, *spec.get("arguments", ()))


async def build(host: RunnerHost) -> ScriptRunner:
    """Build it from what the worker has. Return None where a host cannot run such jobs."""
    return build_kind(ScriptRunner, host)
