"""What many running containers cost one worker: CPU while they are silent, memory, and how late it notices things.

Run by hand, as root, on an engine of its own: `python -m bench.containers [containers]`.
"""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.support.docker_engine import daemon, missing

from bench.docker import Bench
from holdfast.model import Job, Status
from holdfast.store.migrate import migrate
from holdfast.store.store import Store, connect

RUNNING = 200
SILENT_SECONDS = 20.0
ROUNDS = 5


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, of all its threads, also those that ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(pid: int) -> float:
    """Resident memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


async def log_latency(bench: Bench) -> float:
    """Seconds from a line that a container writes to its event."""
    job = await bench.submit("sh", "-c", "sleep 2; cut -d' ' -f1 /proc/uptime; sleep 600")
    while True:
        lines = [line for event in (await bench.store.events.page(job.id)).items if event.type == "log"
                 for line in event.data["lines"]]  # fmt: skip
        if lines:
            took = time.clock_gettime(time.CLOCK_BOOTTIME) - float(lines[0])
            await cancelled(bench, job)
            return took
        await asyncio.sleep(0.005)


async def cancelled(bench: Bench, job: Job) -> float:
    """Seconds from a cancel to the end."""
    began = time.perf_counter()
    await bench.store.jobs.cancel(job.id)
    return await bench.until([job], lambda job: job.status is Status.CANCELLED) - began


async def silent(bench: Bench, pid: int, engine_pid: int) -> tuple[float, float]:
    """Shares of a processor that the worker and the engine use while nothing happens."""
    before = cpu_seconds(pid), cpu_seconds(engine_pid)
    await asyncio.sleep(SILENT_SECONDS)
    return (cpu_seconds(pid) - before[0]) / SILENT_SECONDS, (cpu_seconds(engine_pid) - before[1]) / SILENT_SECONDS


async def measure(bench: Bench, running: int) -> None:
    worker = bench.worker(running + 8)
    engine = int((bench.engine.folder / "pid").read_text())
    try:
        await bench.ours(1)
        empty = megabytes(worker.pid)
        idle, _ = await silent(bench, worker.pid, engine)
        print(f"no containers: worker {100 * idle:.1f} % of a processor, {empty:.0f} MB")
        began = time.perf_counter()
        jobs = [await bench.submit("sleep", "600") for _ in range(running)]
        took = await bench.until(jobs, lambda job: job.attempts == 1) - began
        print(f"{running} containers: all started after {took:.1f} s")
        share, theirs = await silent(bench, worker.pid, engine)
        each = (megabytes(worker.pid) - empty) / running
        print(f"silent: worker {100 * share:.1f} % of a processor, engine {100 * theirs:.1f} %, {each:.2f} MB each")
        print("`true` beside them, seconds:", *[f"{await bench.ours(1):.3f}" for _ in range(ROUNDS)])
        print("a line of output to its event, seconds:", *[f"{await log_latency(bench):.3f}" for _ in range(ROUNDS)])
        print("cancel to its end, seconds:", *[f"{await cancelled(bench, job):.3f}" for job in jobs[:ROUNDS]])
    finally:
        worker.kill()
        worker.wait()


async def main() -> None:
    if (why := missing()) is not None:
        print(f"no figures of containers: {why}")
        return
    running = int(sys.argv[1]) if len(sys.argv) > 1 else RUNNING
    with daemon(live_restore=True) as engine, tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        url = f"sqlite:///{name}/store.db"
        database = await connect(url)
        await migrate(database)
        async with Store(database) as store:
            await measure(Bench(store, url, Path(name), engine), running)


if __name__ == "__main__":
    asyncio.run(main())
