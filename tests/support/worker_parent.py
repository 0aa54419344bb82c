"""A real `holdfast worker --processes N` on a test's database, with an application whose functions leave marks."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from holdfast.model import WorkerRecord
from tests.support.in_process_workers import eventually
from tests.support.worker_processes import WorkerProcess, WorkerProcesses, alive

APP = """
import os, signal, time
from pathlib import Path
from holdfast import Context, Holdfast

if Path("crash").exists():
    os.kill(os.getpid(), signal.SIGKILL)
app = Holdfast()


def note(path, text):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{text}\\n".encode())
    os.close(fd)


@app.function()
def wait(path: str, gate: str) -> int:
    "Say who runs it, wait for a file, and ignore every stop request."
    note(path, f"+ {os.getpid()}")
    while not Path(gate).exists():
        time.sleep(0.01)
    note(path, f"- {os.getpid()}")
    return os.getpid()


@app.function()
async def stop(path: str, ctx: Context) -> str:
    "Run until the worker drains."
    note(path, f"+ {os.getpid()}")
    await ctx.cancel.requested_async()
    return ctx.cancel.reason


@app.function()
async def quick() -> int:
    return os.getpid()


@app.function()
def die_once(path: str) -> int:
    if not Path(path).exists():
        note(path, "died")
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()
"""


class WorkerParentProcess:
    """The parent, and what is known about its processes from outside."""

    def __init__(self, processes: WorkerProcesses, member: WorkerProcess) -> None:
        self._processes = processes
        self._member = member
        self.pid = member.pid

    @property
    def log(self) -> str:
        return self._member.log

    @property
    def started(self) -> list[int]:
        """The processes that it started, in order, those that ended included."""
        return [int(pid) for pid in re.findall(r"worker process \d of \d: pid (\d+)", self.log)]

    async def has_started(self, count: int) -> list[int]:
        """Wait until it has started this many processes; they may not work yet."""
        await self._processes.eventually(lambda: len(self.started) >= count, f"{count} processes are started")
        return self.started

    async def rows(self, count: int) -> Sequence[WorkerRecord]:
        """Wait until exactly this many of its processes are registered and alive; return their rows by id."""

        async def look() -> Sequence[WorkerRecord] | None:
            assert self._member.status is None, self.log
            listed = await self._processes.store.workers.list()
            found = sorted((row for row in listed if row.pid in self.started and alive(row.pid)), key=_order)
            return found if len(found) == count else None

        return await eventually(look, f"{count} processes work\n{self.log}")

    def signal(self, number: int) -> None:
        self._member.signal(number)

    def kill(self) -> None:
        self._member.kill()

    async def dead(self) -> int:
        """Wait for the end of the parent and of everything that it started; return the exit code."""
        code = await self._member.dead()
        await self._processes.eventually(lambda: not any(map(alive, self.started)), "its processes end")
        return code


def start_parent(
    processes: WorkerProcesses, *arguments: str, environment: Mapping[str, str] | None = None
) -> WorkerParentProcess:
    """Start `holdfast worker` with the tests' application and these arguments."""
    (processes.folder / "marking.py").write_text(APP)
    (processes.folder / "argparse.py").write_text("raise ImportError('a module of the application, not of Python')")
    log = processes.folder / f"worker-{len(processes.members)}.log"
    known = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.cli.main", "worker", "--app", "marking:app", *arguments],
            env={**known, **processes.environment("a", {}), **(environment or {})},
            stdout=file, stderr=file, cwd=processes.folder, start_new_session=True,
        )  # fmt: skip
    processes.members.append(WorkerProcess(process, log))
    return WorkerParentProcess(processes, processes.members[-1])


def _order(row: WorkerRecord) -> int:
    return int(row.worker.rpartition(".")[2])
