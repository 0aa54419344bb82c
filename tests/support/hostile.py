"""An installation with a victim's job and an attacker's job side by side, run by root or by an ordinary user."""

import asyncio
import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from holdfast.model import Job, Status
from holdfast.runner.tree_removal import remove_tree
from holdfast.store.migrate import migrate
from holdfast.store.store import connect
from tests.support.in_process_workers import eventually
from tests.support.supervisor_harness import AS_NOBODY, NOBODY, needs_root
from tests.support.worker_processes import WorkerProcess, WorkerProcesses, worker_processes_on

Runs = Literal["root", "ordinary user"]
ORDINARY = NOBODY if os.geteuid() == 0 else os.geteuid()
"""The uid of an ordinary user: our own, unless we are root."""
ROOT = Path(__file__).parents[2]
PROGRAM = (Path(__file__).parent / "hostile_program.py").read_text()
by_both = pytest.mark.parametrize("runs", [pytest.param("root", marks=needs_root), "ordinary user"])
SECRET = "correct-horse-battery-staple"
WORKER_SECRET = "the-worker-alone-knows-this"

VICTIM = """
import ctypes, json, os, signal, socket, tempfile, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
secret = os.environ["SECRET"].encode()
held = ctypes.create_string_buffer(secret)
segment = libc.shmget(0, 4096, 0o1600)
ctypes.memmove(libc.shmat(segment, None, 0), secret, len(secret))
name = os.environ["HOLDFAST_JOB_ID"]
files = ["work-file", "output/file", "/dev/shm/" + name, "/tmp/" + name]
os.umask(0o022)
for path in files:
    with open(path, "wb") as file:
        file.write(secret)
    if path.startswith("/"):
        os.chmod(path, 0o600)
listener = socket.socket(socket.AF_UNIX)
listener.bind("own-socket")
listener.listen()
def leave(*_):
    libc.shmctl(segment, 0, None)
    for path in files[2:]:
        os.unlink(path)
    raise SystemExit(0)
signal.signal(signal.SIGTERM, leave)
facts = {"pid": os.getpid(), "uid": os.getuid(), "gid": os.getgid(), "address": ctypes.addressof(held),
         "segment": segment, "files": [os.path.abspath(path) for path in files]}
print("FACTS " + json.dumps(facts), flush=True)
while True:
    time.sleep(3600)
"""
"""A job with a secret in its environment, its memory, shared memory, and files that it leaves open to others."""


@dataclass
class VictimDetails:
    """What an attacker knows about a running victim."""

    job: Job
    pid: int
    uid: int
    gid: int
    address: int
    segment: int
    files: Sequence[str] = field(default_factory=list)


class Installation:
    """One worker process on a store, with a data folder that only its user is meant to read."""

    def __init__(self, processes: WorkerProcesses, runs: Runs, member: WorkerProcess) -> None:
        self.processes = processes
        self.runs = runs
        self.worker = member

    async def victim(self, **fields: Any) -> VictimDetails:
        """Start a job of another tenant, and wait until it holds its secret."""
        job = await self.processes.command(
            "python3", "-", spec={"stdin": VICTIM}, env={"SECRET": SECRET}, secrets=["WORKER_SECRET"], **fields
        )

        async def reported() -> str | None:
            assert self.worker.status is None, self.worker.log
            lines = await self.processes.log(job)
            return next((line for line in lines if line.startswith("FACTS ")), None)

        line = await eventually(reported, "the victim starts")
        return VictimDetails(job=job, **json.loads(line.removeprefix("FACTS ")))

    async def attack(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Run the hostile program as a job of another tenant, and return what it found."""
        job = await self.submit(PROGRAM, env={"TARGETS": json.dumps(targets)}, timeout=120)
        ended = await self.ended(job, Status.SUCCEEDED)
        result: dict[str, Any] = ended.result
        return result

    async def submit(self, program: str, env: Mapping[str, str] | None = None, **fields: Any) -> Job:
        """Submit a Python program as a job of another tenant than the victim's."""
        spec = {"command": ["python3", "-"], "stdin": program, "env": dict(env or {}), **fields.pop("spec", {})}
        return await self.processes.store.jobs.submit({"runner": "process", "spec": spec, **fields}, tenant="red")

    async def ended(self, job: Job, *statuses: Status) -> Job:
        async def look() -> Job | None:
            assert self.worker.status is None, self.worker.log
            found = await self.processes.store.jobs.get(job.id, tenant="red")
            return found if found.status.terminal or found.status is Status.PAUSED else None

        found = await eventually(look, "the hostile job ends")
        assert not statuses or found.status in statuses, (found.status, found.error, await self.log(job))
        return found

    async def log(self, job: Job) -> list[str]:
        events = (await self.processes.store.events.page(job.id, tenant="red")).items
        return [line for event in events if event.type == "log" for line in event.data["lines"]]

    async def stop(self, job: Job) -> None:
        await self.processes.store.jobs.cancel(job.id)
        await self.processes.ended(job, Status.CANCELLED)


@contextlib.asynccontextmanager
async def installation(url: str, runs: Runs, *, slots: int = 4, **settings: Any) -> AsyncIterator[Installation]:
    """Run a worker as a process while the block lasts: root with users for its jobs, or an ordinary user without."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-hostile-", dir="/tmp"))
    try:
        if url.startswith("sqlite"):
            url = f"sqlite:///{folder / 'store.db'}"
            database = await connect(url)
            await migrate(database)
            await database.close()
        through = () if runs == "root" or os.geteuid() != 0 else (*passable(), *AS_NOBODY)
        _hand_over(folder, runs)
        async with worker_processes_on(url, folder) as processes:
            processes.set(process_user=None)
            environment = {f"HOLDFAST_{name.upper()}": str(value) for name, value in settings.items()}
            environment |= {"HOME": str(folder), "HOLDFAST_SECRET_WORKER_SECRET": WORKER_SECRET}
            member = processes.start({"default": slots}, through=through, environment=environment)
            yield Installation(processes, runs, member)
    finally:
        await asyncio.to_thread(remove_tree, folder)


def _hand_over(folder: Path, runs: Runs) -> None:
    """Make a new data folder one that root's jobs can pass through, or an ordinary user's own."""
    if runs == "root":
        folder.chmod(0o711)
    else:
        for path in (folder, *folder.iterdir()):
            os.chown(path, ORDINARY, -1)


def passable() -> Sequence[str]:
    """A prefix for commands of an ordinary user: nothing, if they can reach the interpreter and this project.

    Else both are mounted again, in a mount namespace of its own, below an empty folder in place of the closed one.
    """
    closed = {kept: folder for kept in (Path(sys.base_prefix), ROOT) if (folder := _closed_above(kept)) is not None}
    if not closed:
        return ()
    script = ["set -e"]
    for n, kept in enumerate(closed):
        script += [f"kept{n}=$(mktemp -d)", f"mount --bind {shlex.quote(str(kept))} $kept{n}"]
    script += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(folder))}" for folder in {*closed.values()}]
    for n, kept in enumerate(closed):
        script += [f"mkdir -p {shlex.quote(str(kept))}", f"mount --move $kept{n} {shlex.quote(str(kept))}"]
    script.append('exec "$@"')
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(script), "sh")


def _closed_above(path: Path) -> Path | None:
    """The outermost folder above a path that an ordinary user may not pass."""
    return next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)
