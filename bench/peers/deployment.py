"""One peer in one fresh database: a client process that submits, and worker processes."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench.installation import HOLDFAST, ROOT, until
from bench.peers import environments
from bench.peers.keepers import Keepers, Probe, SqliteProbe
from bench.peers.peer import Keeper, Peer, Runtime
from bench.peers.usage import memory_mb, session, session_cpu

SLOTS = 2000
"""Jobs that one holdfast worker runs at once; measured as its best for empty functions."""
CHUNK = 10_000
STARTS_WITHIN = 60.0
SUBMITS_WITHIN = 600.0


class Workers:
    """Worker processes, each in a session of its own, with what they started."""

    def __init__(self, processes: list["subprocess.Popen[bytes]"]) -> None:
        self._processes = processes

    def signal(self, number: signal.Signals) -> None:
        """Send it to every process of every worker: they stop and go on at the same moment."""
        for process in self._processes:
            os.killpg(process.pid, number)

    def cpu(self) -> float:
        return sum(session_cpu(process.pid) for process in self._processes)

    def memory_mb(self) -> float:
        """Memory per worker, with what it started."""
        return sum(memory_mb(session(process.pid)) for process in self._processes) / len(self._processes)

    def check(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise RuntimeError(f"worker {process.pid} ended with {process.returncode}")

    async def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Deployment:
    """A peer, its database and its client."""

    def __init__(self, peer: Peer, url: str, folder: Path, probe: Probe) -> None:
        self.peer, self.url, self.folder, self.probe = peer, url, folder, probe
        self._mark = 0
        self._before = 0
        self._submitted = 0
        self._client: asyncio.subprocess.Process | None = None

    # The client

    async def open(self) -> None:
        with (self.folder / "client.log").open("ab") as log:
            self._client = await asyncio.create_subprocess_exec(
                *command(self.peer, "client", self.url),
                cwd=ROOT,
                env=self.environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        await self._hear("ready")

    async def _hear(self, start: str) -> str:
        assert self._client is not None
        assert self._client.stdout is not None
        while line := (await self._client.stdout.readline()).decode():
            if line.startswith(start):
                return line
        raise RuntimeError(f"{self.peer.name}: its client ended:\n{_tail(self.folder / 'client.log')}")

    async def tell(self, do: str, **said: Any) -> float:
        """Give the client a command; return the seconds that it took, by its own clock."""
        assert self._client is not None
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps({"do": do, **said}).encode() + b"\n")
        return float(json.loads(await asyncio.wait_for(self._hear("{"), SUBMITS_WITHIN))["seconds"])

    async def submit_bulk(self, count: int) -> float:
        self._submitted += count
        return sum([await self.tell("bulk", count=min(CHUNK, count - n)) for n in range(0, count, CHUNK)])

    async def submit_singles(self, count: int) -> float:
        self._submitted += count
        return await self.tell("singles", count=count)

    async def close(self) -> None:
        if self._client is not None and self._client.returncode is None:
            assert self._client.stdin is not None
            self._client.stdin.close()
            try:
                await asyncio.wait_for(self._client.wait(), 20)
            except TimeoutError:
                self._client.kill()
                await self._client.wait()

    # The database

    async def baseline(self) -> None:
        """From here on `ended` counts."""
        self._submitted = 0
        self._mark = await self.probe.number(self.peer.mark)
        self._before = 0 if self.peer.ended_counts_left else await self.probe.number(self._ended_query)

    @property
    def _ended_query(self) -> str:
        return self.peer.ended.format(mark=self._mark)

    async def ended(self) -> int:
        """How many of the jobs submitted since the baseline have ended."""
        number = await self.probe.number(self._ended_query)
        return self._submitted - number if self.peer.ended_counts_left else number - self._before

    async def records(self) -> dict[str, int]:
        """What the peer keeps of its jobs, counted."""
        return {record.what: await self.probe.number(record.query) for record in self.peer.records}

    # The workers

    @property
    def stamps(self) -> Path:
        return self.folder / "stamps"

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "PYTHON"))}
        ours = {
            "HOLDFAST_DATABASE_URL": self.url,
            "HOLDFAST_DATA_DIR": str(self.folder),
            "HOLDFAST_PROCESS_USER": "root",
        }
        more = ours if self.peer.runtime is Runtime.OURS else {}
        return {**kept, **more, "BENCH_STAMPS": str(self.stamps), "PYTHONPATH": str(ROOT)}

    @contextlib.asynccontextmanager
    async def workers(self, count: int) -> AsyncIterator[Workers]:
        """Worker processes that are up and idle."""
        logs = [self.folder / f"worker-{n}.log" for n in range(count)]
        workers = Workers([self._start(log) for log in logs])
        try:
            await until(f"{self.peer.name}: {count} workers", lambda: self._up(logs, workers), within=STARTS_WITHIN)
            yield workers
            workers.check()
        except RuntimeError as error:
            raise RuntimeError(f"{self.peer.name}: {error}\n" + "\n".join(_tail(log) for log in logs)) from error
        finally:
            await workers.stop()

    def _start(self, log: Path) -> "subprocess.Popen[bytes]":
        given = command(self.peer, "worker", self.url)
        with log.open("wb") as file:
            return subprocess.Popen(
                given, cwd=ROOT, env=self.environment(), stdout=file, stderr=file, start_new_session=True
            )

    async def _up(self, logs: list[Path], workers: Workers) -> bool:
        workers.check()
        if self.peer.registered is not None:
            return await self.probe.number(self.peer.registered) >= len(logs)
        return all("ready" in log.read_text().splitlines() for log in logs)


def command(peer: Peer, mode: str, url: str) -> list[str]:
    """The command line of a peer's program."""
    match peer.runtime:
        case Runtime.NODE:
            folder, node = environments.node()
            return [str(node), str(folder / f"{peer.program}.mjs"), mode, url]
        case Runtime.OURS if mode == "worker" and peer.program == "holdfast":
            app = f"bench.peers.programs.{peer.program}:app"
            return [str(HOLDFAST), "worker", "--app", app, "--queue", f"default:{SLOTS}"]
        case Runtime.OURS:
            python = sys.executable
        case Runtime.PYTHON:
            python = str(environments.python())
        case Runtime.NEWER_PYTHON:
            python = str(environments.newer_python())
    return [python, "-m", f"bench.peers.programs.{peer.program}", mode, url]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log.exists() else ""


class Deployments:
    """Fresh deployments of peers. A peer's database is installed once and copied from then on."""

    def __init__(self, keepers: Keepers) -> None:
        self.keepers = keepers
        self._templates: dict[str, str] = {}

    async def _install(self, peer: Peer, url: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = await asyncio.create_subprocess_exec(
            *command(peer, "install", url),
            cwd=ROOT,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        if process.returncode != 0:
            raise environments.Missing(f"its installation failed: {said.decode()[-600:]}")

    async def prepare(self, peer: Peer) -> None:
        """Install the peer: its packages, and the template of its database. Raises `Missing`."""
        match peer.keeper:
            case Keeper.POSTGRES:
                command(peer, "install", "")
                name = f"template_{peer.program}"
                url = await self.keepers.postgres.make(name)
                await self._install(peer, url)
                self._templates[peer.name] = name
            case Keeper.SQLITE:
                command(peer, "install", "")
            case Keeper.REDIS:
                command(peer, "install", "")
                await self.keepers.redis()

    @contextlib.asynccontextmanager
    async def fresh(self, peer: Peer) -> AsyncIterator[Deployment]:
        """A deployment on a fresh database, with its client open."""
        folder = self.keepers.folder / f"{peer.program}-{os.urandom(4).hex()}"
        folder.mkdir()
        async with contextlib.AsyncExitStack() as stack:
            url, probe = await self._database(stack, peer, folder)
            deployment = Deployment(peer, url, folder, probe)
            try:
                await deployment.open()
                yield deployment
            finally:
                await deployment.close()

    async def _database(self, stack: contextlib.AsyncExitStack, peer: Peer, folder: Path) -> tuple[str, Probe]:
        match peer.keeper:
            case Keeper.POSTGRES:
                return await stack.enter_async_context(self.keepers.postgres.fresh(self._templates[peer.name]))
            case Keeper.REDIS:
                return await stack.enter_async_context((await self.keepers.redis()).fresh())
            case Keeper.SQLITE:
                path = folder / "jobs.db"
                url = f"sqlite:///{path}" if peer.runtime is Runtime.OURS else str(path)
                await self._install(peer, url)
                return url, SqliteProbe(path)
