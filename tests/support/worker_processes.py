"""Real worker processes on one database, which tests kill and stop.

Afterwards all their processes are killed: workers, supervisors and children are found by the test's own folder.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config import Settings
from holdfast.model import Event, Job, Status
from holdfast.runner.attempt_folder import AttemptFolder
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.runner.process import ProcessRunner
from holdfast.runner.state_folder import StateFolder
from holdfast.store import Store
from holdfast.store.store import connect
from holdfast.worker.upkeep import Upkeep
from tests.support.crashing_worker import Hook, WorkerOptions
from tests.support.in_process_workers import InProcessWorkers, eventually

TTL = 3.0
LONG_TTL = 10.0
AT_ONCE = 4
"""Workers that are started together."""
LINES = 24
CHATTY = f"""
echo $$ >> "$MARKER"
n=1
say() {{ echo "out $n"; echo "err $n" >&2; n=$((n + 1)); }}
while [ $n -le 12 ]; do say; done
while [ -n "$GATE" ] && [ ! -e "$GATE" ]; do sleep 0.05; done
while [ $n -le {LINES} ]; do sleep ${{PACE:-0.1}}; say; done
mkdir -p "$HOLDFAST_WORK_DIR/output" && echo "$HOLDFAST_ATTEMPT" > "$HOLDFAST_WORK_DIR/output/made"
printf 'last out'; printf 'last err' >&2
"""
"""Marks that it ran; says some lines at once and some over time, leaves a file, and ends in the middle of a line."""


class WorkerProcess:
    """One worker process."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def status(self) -> int | None:
        """How it ended, or None while it lives."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def dead(self) -> int:
        """Wait for its end."""

        async def look() -> bool:
            return self._process.poll() is not None

        await eventually(look, f"worker {self.pid} ends")
        return self._process.returncode

    async def stopped(self) -> None:
        """Wait until it has stopped itself."""

        async def look() -> bool:
            assert self.status is None, self.log
            return _state(self.pid) == "T"

        await eventually(look, f"worker {self.pid} stops")

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(30)


@asynccontextmanager
async def worker_processes_on(url: str, folder: Path) -> AsyncIterator["WorkerProcesses"]:
    """Workers on a migrated store, while the block lasts."""
    async with Store(await connect(url)) as store:
        processes = WorkerProcesses(url, folder, store, await store.installation())
        try:
            yield processes
        finally:
            processes.clear()


class WorkerProcesses(InProcessWorkers):
    """Workers on one database, on one or several hosts: each state folder is a host of its own."""

    def __init__(self, url: str, folder: Path, store: Store, installation: str) -> None:
        super().__init__(url, folder, store)
        self.settings = replace(self.settings, lease_ttl=TTL, heartbeat_interval=TTL / 3)
        self.folder = folder
        self.artifacts = FolderArtifacts(self.settings.shared)
        self.installation = installation
        self.members: list[WorkerProcess] = []

    def host(self, name: str) -> Path:
        return self.folder / "hosts" / name

    def start(
        self,
        queues: Mapping[str, int],
        *hooks: Hook,
        host: str = "a",
        boot: str | None = None,
        adopt_backoff: float | None = None,
        adopts: bool = True,
        lose_answers: bool = False,
        environment: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
        **settings: Any,
    ) -> WorkerProcess:
        """Start a worker process, through a program if one is given; the others' settings hold unless given."""
        part = WorkerOptions(
            queues=dict(queues), hooks=hooks, boot=boot, adopt_backoff=adopt_backoff, adopts=adopts,
            lose_answers=lose_answers,
        )  # fmt: skip
        command = [*through, sys.executable, "-m", "tests.support.crashing_worker", msgspec.json.encode(part).decode()]
        log = self.folder / f"worker-{len(self.members)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                env={**os.environ, **self.environment(host, settings), **(environment or {})},
                stdout=file,
                stderr=file,
                cwd=Path(__file__).parents[2],
                # The kernel continues the stopped processes of a group whose shell exits.
                start_new_session=True,
            )
        self.members.append(WorkerProcess(process, log))
        return self.members[-1]

    async def start_and_stop(self, hooks: Mapping[str, Hook]) -> dict[str, WorkerProcess]:
        """Start a worker for each queue and wait until its hook has stopped it; return them by queue.

        Each must keep its lease until it gets there. So only a few start at once, and their leases last long enough for
        a busy machine; none adopts the jobs of the others.
        """
        stopped: dict[str, WorkerProcess] = {}
        waiting = list(hooks)
        while waiting:
            queues, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            members = {
                queue: self.start({queue: 1}, hooks[queue], adopts=False, lease_ttl=LONG_TTL) for queue in queues
            }
            for member in members.values():
                await member.stopped()
            stopped |= members
        return stopped

    def environment(self, host: str, settings: Mapping[str, Any]) -> dict[str, str]:
        chosen: Settings = replace(self.settings, state_dir=self.host(host), **settings)
        named = {
            name: getattr(chosen, name)
            for name in (
                "database_url", "data_dir", "state_dir", "process_user", "process_uids", "process_uids_dir",
                "lease_ttl", "heartbeat_interval",
                "reaper_interval", "poll_interval", "orphan_grace", "drain_grace", "listen", "docker_host",
            )
        }  # fmt: skip
        return {f"HOLDFAST_{name.upper()}": str(value or "none") for name, value in named.items()}

    # Jobs

    async def chatty(self, name: str, *, pace: float = 0.1, gated: bool = False, **fields: Any) -> Job:
        """Submit a process that marks that it ran, and says something: half of it at once, half with pauses.

        A gated one waits in the middle until `open_gate`.
        """
        gate = str(self.folder / f"{name}.gate") if gated else ""
        env = {"MARKER": self.marker(name), "PACE": str(pace), "GATE": gate}
        return await self.sh(CHATTY, env=env, **fields)

    def open_gate(self, name: str) -> None:
        self.touch(f"{name}.gate")

    def marker(self, name: str) -> str:
        return str(self.folder / f"{name}.marker")

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def marker_lines(self, name: str) -> list[str]:
        """Return the lines of a marker file."""
        with contextlib.suppress(FileNotFoundError):
            return Path(self.marker(name)).read_text().split("\n")[:-1]
        return []

    async def wait_for_marker(self, name: str, lines: int = 1) -> list[str]:
        """Wait until a marker file has this many lines."""

        async def look() -> list[str] | None:
            return found if len(found := self.marker_lines(name)) >= lines else None

        return await eventually(look, f"{name} is marked")

    async def ended(self, job: Job | str, *statuses: Status) -> Job:
        try:
            return await super().ended(job, *statuses)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{await self._story(job)}") from None

    async def _story(self, job: Job | str) -> str:
        """Describe a job that did not end as expected, with the last log lines of all workers."""
        found = await self.get(job)
        lines = [f"{found.status} in {found.queue}, attempt {found.attempt}, {found.error}"]
        lines += [f"{event.at:%T} {event.type} {event.data}" for event in await self.events(job)][-20:]
        for member in self.members:
            lines += [f"worker {member.pid}, {_state(member.pid)}:", *member.log.splitlines()[-8:]]
        return "\n".join(lines)

    async def leaves(self, job: Job, status: Status) -> None:
        """Wait until a job is in another status."""

        async def look() -> bool:
            return (await self.get(job)).status is not status

        await eventually(look, f"it is {status} no longer")

    async def leases(self, job: Job, what: str | None = None) -> list[str]:
        """What happened to a job's lease, in order."""
        return [event.data["lease"] for event in await self.events(job, "lease") if what in (None, event.data["lease"])]

    async def statuses(self, job: Job) -> list[str]:
        return [event.data["status"] for event in await self.events(job, "status")]

    async def cancels(self, job: Job) -> list[str]:
        return [event.data["cancel"] for event in await self.events(job, "cancel")]

    async def assert_whole(self, name: str, job: Job, *, attempts: int = 1) -> None:
        """The job succeeded in one start of its child, and its record is complete and true."""
        job = await self.ended(job, Status.SUCCEEDED)
        assert len(self.marker_lines(name)) == attempts, name
        assert (job.attempts, job.attempt) == (attempts, attempts), name
        for stream, word in (("stdout", "out"), ("stderr", "err")):
            expected = [f"{word} {n}" for n in range(1, LINES + 1)] + [f"last {word}"]
            assert await self.log(job, stream) == expected, f"{name}: {stream}"
        last = (await self.store.attempts.list(job.id))[-1]
        with self.artifacts.open(job.id, last.attempt, last.token, "made").content as made:
            assert made.read() == f"{attempts}\n".encode(), name
        await self.assert_true(job)

    async def assert_true(self, job: Job) -> Sequence[Event]:
        """The events have no gap, and the last status among them is the job's."""
        job = await self.get(job)
        events = await self.events(job)
        assert [event.seq for event in events] == list(range(1, job.last_seq + 1))
        assert [event.data["status"] for event in events if event.type == "status"][-1] == job.status
        return events

    async def eventually(self, look: Callable[[], Any], what: str = "") -> Any:
        """Wait for something that needs no database."""

        async def ask() -> Any:
            return look()

        return await eventually(ask, what)

    # Hosts

    def folders_of(self, host: str = "a") -> list[Path]:
        return sorted((self.host(host) / "attempts" / self.installation).glob("*"))

    def folder_of(self, job: Job, attempt: int = 1, host: str = "a") -> AttemptFolder:
        return AttemptFolder(self.host(host) / "attempts" / self.installation / f"{job.id}.{attempt}")

    def locks(self, host: str = "a") -> list[str]:
        return sorted(path.name for path in (self.host(host) / "workers" / self.installation).glob("*.lock"))

    async def sweep(self, host: str = "a", *, keep_marker_for: float = 3600.0) -> None:
        """What a worker of this host does once a minute."""
        state = StateFolder(self.host(host))
        runner = ProcessRunner(state, self.installation, user=None, log_cap=1 << 20, keep_marker_for=keep_marker_for)
        chores = Upkeep(
            self.store, "sweeper", self.settings, locks=state.locks(self.installation),
            runners=[runner], held=lambda _: False,
        )  # fmt: skip
        try:
            await chores.sweep()
            if (
                keep_marker_for == 0.0
            ):  # As if hours had passed: what a worker was killed over while it made it goes too.
                await runner.sweep_incomplete(0.0)
        finally:
            runner.close()

    def supervisor_of(self, job: Job, attempt: int = 1, host: str = "a") -> int:
        started = self.folder_of(job, attempt, host).started()
        assert started is not None
        return started.supervisor_pid

    # The end

    def clear(self) -> None:
        """Kill all that was started here: first the workers, then supervisors and what they ran, by their folder."""
        for member in self.members:
            member.kill()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self) -> list[int]:
        """The supervisors and children of this test that live."""
        folder = str(self.folder).encode()
        pids = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if pid == os.getpid() or _state(pid) in ("Z", None):
                continue
            arguments = _read(pid, "cmdline").split(b"\0")
            supervisor = arguments[0].endswith(b"holdfast-supervisor") and folder in arguments[1]
            if supervisor or b"HOLDFAST_WORK_DIR=" + folder in _read(pid, "environ"):
                pids.append(pid)
        return pids


def alive(pid: int | str) -> bool:
    return _state(int(pid)) not in ("Z", None)


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
