"""Starts one attempt, as a worker does, and waits: `python -m holdfast.testing.killed_worker FILE`.

The file is a pickle of the runner's name, the settings and the request. The test kills this process after its first
line; it also ends when its input does, which is when the test has died.
"""

import asyncio
import pickle
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from holdfast.assemble import build_runner
from holdfast.config import Settings
from holdfast.registry import runner_named
from holdfast.runner.base import Runner, StartRequest
from holdfast.runner.runner_host import RunnerHost
from holdfast.runner.state_folder import StateFolder

STARTED = b"started\n"


async def built(name: str, settings: Settings, installation: str, stack: AsyncExitStack) -> Runner:
    """Build a runner as a worker does."""
    host = RunnerHost(settings=settings, installation=installation, state=StateFolder(settings.state), stack=stack)
    runner = await build_runner(runner_named(name), host)
    assert runner is not None, f"runner {name} says that this host cannot run its jobs"
    return runner


async def lease_confirmed() -> None:
    """Confirm that the attempt is ours, as the database would."""


async def start_and_wait(name: str, settings: Settings, request: StartRequest) -> None:
    async with AsyncExitStack() as stack:
        runner = await built(name, settings, request.identity.installation, stack)
        await runner.start(request, lease_confirmed)
        sys.stdout.buffer.write(STARTED)
        sys.stdout.buffer.flush()
        await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(start_and_wait(*pickle.loads(Path(sys.argv[1]).read_bytes())))
