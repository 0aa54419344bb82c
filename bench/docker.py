"""What a job in a container costs against a bare `docker run` of the same image, and how fast containers are adopted.

Run by `make bench`, as root, on an engine of its own. In turns and in one run, so that the ratios mean something.
"""

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from tests.support.crashing_worker import WorkerOptions
from tests.support.docker_engine import IMAGE, DockerEngine, daemon, missing

from holdfast.model import Job, Status
from holdfast.runner.frames import Stream, from_copy
from holdfast.store.migrate import migrate
from holdfast.store.store import Store, connect

ROUNDS = 15
AT_ONCE = 8
BATCHES = 7
RUNNING = 50
MOST_RATIO = {1: 1.15, AT_ONCE: 1.1}
MOST_SECONDS = 5.0


class Bench:
    """A SQLite store with fsync on, and worker processes on it."""

    def __init__(self, store: Store, url: str, folder: Path, engine: DockerEngine) -> None:
        self.store = store
        self.engine = engine
        self._env = {
            "HOLDFAST_DATABASE_URL": url,
            "HOLDFAST_DATA_DIR": str(folder),
            "HOLDFAST_DOCKER_HOST": engine.host,
            "HOLDFAST_PROCESS_USER": "root",
        }

    def worker(self, slots: int) -> "subprocess.Popen[bytes]":
        part = msgspec.json.encode(WorkerOptions(queues={"default": slots})).decode()
        command = [sys.executable, "-m", "tests.support.crashing_worker", part]
        return subprocess.Popen(command, env={**os.environ, **self._env}, stderr=subprocess.DEVNULL)

    async def submit(self, *command: str) -> Job:
        return await self.store.jobs.submit({"runner": "docker", "spec": {"image": IMAGE, "command": list(command)}})

    async def until(self, jobs: list[Job], fits: Callable[[Job], bool]) -> float:
        """Wait until all jobs look so; return the time."""
        for job in jobs:
            while not fits(await self.store.jobs.get(job.id)):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        return time.perf_counter()

    async def ours(self, count: int) -> float:
        """Seconds from the first submit to the last end."""
        started = time.perf_counter()
        jobs = [await self.submit("true") for _ in range(count)]
        return await self.until(jobs, lambda job: job.status is Status.SUCCEEDED) - started

    async def bare(self, count: int) -> float:
        """Seconds for so many `docker run` at once."""
        command = ["docker", "-H", self.engine.host, "run", "--rm", "--network=none", IMAGE, "true"]
        started = time.perf_counter()
        runs = [await asyncio.create_subprocess_exec(*command) for _ in range(count)]
        for run in runs:
            assert await run.wait() == 0
        return time.perf_counter() - started


async def compare(bench: Bench, count: int, rounds: int) -> tuple[float, float, float]:
    ours, bare = [], []
    for _ in range(rounds):
        bare.append(await bench.bare(count))
        ours.append(await bench.ours(count))
    ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    return statistics.median(ours), statistics.median(bare), ratio


async def adoption(bench: Bench) -> tuple[float, int]:
    """Kill a worker with 50 containers; return when the last supervisor obeyed another, and how many started again."""
    victim = bench.worker(RUNNING)
    jobs = [await bench.submit("sleep", "600") for _ in range(RUNNING)]
    await bench.until(jobs, lambda job: job.attempts == 1)
    before = set(bench.engine.docker("ps", "-q").split())
    successor = bench.worker(RUNNING)
    await asyncio.sleep(5)  # It is up, and has nothing to do.
    killed = datetime.now(UTC)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    await asyncio.sleep(3 * MOST_SECONDS)  # Nobody looks, which would cost time too: the supervisors note when it was.
    held = {name: held_at(bench.engine, name) for name in before}
    after = set(bench.engine.docker("ps", "-q").split())
    successor.send_signal(signal.SIGTERM)
    successor.wait()
    return (max(held.values()) - killed).total_seconds(), len(after ^ before)


def held_at(engine: DockerEngine, container: str) -> datetime:
    """When a supervisor acknowledged its new owner, by its own clock."""
    frames = [from_copy(line.encode()) for line in engine.docker("logs", container).splitlines()]
    events = ((frame.at, frame.event) for frame in frames if frame.stream is Stream.EVENTS)
    return next((at for at, event in events if event.get("verb") == "hold"), datetime.now(UTC))


async def main() -> None:
    if (why := missing()) is not None:
        print(f"no figures of containers: {why}")
        return
    late: list[str] = []
    with daemon(live_restore=True) as engine, tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        url = f"sqlite:///{name}/store.db"
        database = await connect(url)
        await migrate(database)
        async with Store(database) as store:
            bench = Bench(store, url, Path(name), engine)
            with working(bench, AT_ONCE):
                await bench.ours(1)
                print(f"{'`true` in a container':<28} {'holdfast':>10} {'docker run':>12} {'ratio':>7}")
                for count, rounds in ((1, ROUNDS), (AT_ONCE, BATCHES)):
                    ours, bare, ratio = await compare(bench, count, rounds)
                    print(f"{f'{count} at a time, seconds':<28} {ours:>10.3f} {bare:>12.3f} {ratio:>7.2f}")
                    late += [f"{count} at a time"] if ratio > MOST_RATIO[count] else []
            took, again = await adoption(bench)
            print(f"{RUNNING} containers, their worker killed: all adopted after {took:.2f} s, {again} started again")
            late += ["adoption"] if took > MOST_SECONDS or again else []
    if late:
        print(f"BELOW what we promise: {', '.join(late)}")
        sys.exit(1)


@contextlib.contextmanager
def working(bench: Bench, slots: int) -> Any:
    worker = bench.worker(slots)
    try:
        yield
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait()


if __name__ == "__main__":
    asyncio.run(main())
