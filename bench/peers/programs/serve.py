"""What every Python peer's program shares: the commands of its client, and the clock of its stamp jobs.

A program runs in the peer's own virtual environment, so only the standard library may be imported here. It has three
modes: `install` prepares a database, `client` submits what it is told on standard input, `worker` runs jobs.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

PACED_BATCH = 20
"""Jobs in one call of the paced load: 400 jobs/s are 20 calls a second."""


class Program(Protocol):
    """One peer: `at` is None for an empty job, else the time of the submit for a job that writes down its delay."""

    async def install(self) -> None: ...

    async def open(self) -> None: ...

    async def bulk(self, count: int, at: int | None) -> None: ...

    async def one(self, at: int | None) -> None: ...

    async def future(self, count: int) -> None:
        """Submit jobs that are due in a day: the pattern from which the harness makes a million."""

    async def close(self) -> None: ...

    async def work(self) -> None:
        """Run jobs until SIGTERM; call `ready` once jobs are picked up."""


def ready() -> None:
    print("ready", flush=True)


def stamp(at: int) -> None:
    """Write down how long a job waited: its submit and its first line, on the clock that all processes share."""
    now = time.monotonic_ns()
    file = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{at} {now}\n".encode())
    os.close(file)


async def command(program: Program, said: dict[str, Any]) -> None:
    count: int = said.get("count", 0)
    match said["do"]:
        case "bulk":
            await program.bulk(count, None)
        case "singles":
            for _ in range(count):
                await program.one(None)
        case "stamps":
            for _ in range(count):
                await asyncio.sleep(said["every"])
                await program.one(time.monotonic_ns())
        case "paced":
            await paced(program, said["rate"], said["seconds"])
        case "future":
            await program.future(count)


async def paced(program: Program, rate: float, seconds: float) -> None:
    """Submit at a steady rate. A call that is late is not skipped: the rate holds over the whole time."""
    began = time.monotonic()
    for n in range(int(rate * seconds / PACED_BATCH)):
        await asyncio.sleep(max(0.0, began + n * PACED_BATCH / rate - time.monotonic()))
        await program.bulk(PACED_BATCH, time.monotonic_ns())


async def serve(program: Program) -> None:
    """Answer commands, one JSON line each, with the seconds they took."""
    await program.open()
    ready()
    while line := await asyncio.to_thread(sys.stdin.readline):
        started = time.perf_counter()
        await command(program, json.loads(line))
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)
    await program.close()


async def main(program: Program, mode: str) -> None:
    match mode:
        case "install":
            await program.install()
        case "client":
            await serve(program)
        case "worker":
            await program.work()


def run(make: Callable[[str], Program], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    """The whole program: `python -m … MODE URL`."""
    mode, url = sys.argv[1:]
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main(make(url), mode))
