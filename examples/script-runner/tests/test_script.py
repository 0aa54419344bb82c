"""The runner `script` guarantees what every runner does; and what is its own."""

from collections.abc import Mapping
from typing import Any

from holdfast.runner.base import Runner
from holdfast.runner.frames import Stream
from holdfast.testing import RunnerSuite


class TestScript(RunnerSuite):
    name = "script"

    def spec(self, script: str) -> Mapping[str, Any]:
        return {"script": script}


class TestPython(RunnerSuite):
    """The same with the other reader: it becomes the shell of the suite's scripts."""

    name = "script"

    def spec(self, script: str) -> Mapping[str, Any]:
        text = f"import os, sys; os.execvp('sh', ['sh', '-c', {script!r}, *sys.argv[1:]])"
        return {"script": text, "reader": "python3", "arguments": ["name", "one"]}

    async def test_arguments(self, runner: Runner) -> None:
        _, attempt = await self.started(runner, 'echo "$0 $1"')
        await attempt.end()
        assert attempt.output[Stream.STDOUT] == b"name one\n"
        await attempt.running.remove(had_other_owners=False)
