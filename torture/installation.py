"""The installation under test: a database, hosts with their workers, servers, and what keeps them running.

Each host is a state folder of its own. The keeper restarts a dead process after a while. A worker that waits
in the middle of a step (see instrumented_cli.py) is stopped there by the keeper, for longer than a lease lasts.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tests.support.cluster import Server
from tests.support.docker_engine import DockerEngine
from tests.support.ports import free_port
from tests.support.proxy import Proxy

from holdfast.store.store import sqlite_path
from holdfast.worker.pipeline_execution import SNAPSHOT_CHANGED
from torture import clocks
from torture.history import HARNESS, Fault, History, Lag, ProcessExit, boottime
from torture.postgres_pipelines import QUEUE
from torture.processes import Part, state
from torture.worker_probe import LATE, TICK

TTL = 6.0
SETTINGS = {
    "LEASE_TTL": TTL, "HEARTBEAT_INTERVAL": TTL / 4, "REAPER_INTERVAL": 1.0, "POLL_INTERVAL": 0.3, "ORPHAN_GRACE": 3.0,
    "DRAIN_GRACE": 1.0, "STOP_GRACE": 1.0, "PROCESS_USER": "root", "AUTH": "off", "AUTH_OFF_AS_ROOT": "true",
    "RATE_LIMIT": "none",
}  # fmt: skip
WORKERS = {"a1": "a", "a2": "a", "b1": "b", "d1": "d"}
SMALL = "d"
"""The host whose disk is small."""
DATA = "data"
"""The disk with what all hosts share, and SQLite's file."""
SERVERS = ("s1", "s2")
DIRECT = "s1"
"""The part that has no proxy between itself and its Postgres: somebody can always be asked."""
SLOTS = 10
FOREVER = 1e12
MOST_STARTS = 5
MOST_STOPPED = 2
"""Workers in the hands of faults above which none is stopped at a step: somebody has to be there to adopt."""
DEADLOCK, DETAILS = "deadlock detected", 12
MENDED = "repaired a stuck gate"
DAMAGED = re.compile(SNAPSHOT_CHANGED % "([0-9a-f]{64})")


@dataclass
class Installation:
    """All that runs, and the history that is written of it."""

    folder: Path
    url: str
    history: History
    rng: random.Random
    postgres: Server | None = None
    engine: DockerEngine | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of this installation only."""
    postgres_struck: bool = False
    engine_struck: bool = False
    disks: Mapping[str, Path] = field(default_factory=dict)
    """Disks that can be filled, by what they are for: a host's state, or all that hosts share and SQLite's file."""
    breaking: str = ""
    """The way in which this build is broken, on purpose."""
    waits: float = 0.0
    """How often a worker waits at a step of an attempt, to be stopped there."""
    step: str = ""
    """The one step to wait at; empty: any."""
    lingers: str = ""
    """The statement after which transactions linger, on Postgres."""
    one_host: bool = False
    """Whether all workers are on host a, where each can adopt what another left."""
    proxies: dict[str, Proxy] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    clocks: dict[str, str] = field(default_factory=dict)
    """Workers whose clock is shifted at their next start, by how much."""
    dead_hosts: set[str] = field(default_factory=set)
    """Hosts where nothing runs, no worker and no child, and nothing is started."""
    calm: bool = False
    """Whether the faults are over."""

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def witness(self) -> Path:
        return self.folder / "witness"

    def host(self, name: str) -> Path:
        return self.folder / "hosts" / name

    @property
    def shared(self) -> Path:
        return self.folder / "data" / "shared"

    @property
    def workers(self) -> list[Part]:
        return [part for part in self.parts.values() if part.name in WORKERS]

    @property
    def servers(self) -> list[Part]:
        return [part for part in self.parts.values() if part.name in SERVERS]

    def url_of(self, server: str) -> str:
        return f"http://127.0.0.1:{self.ports[server]}"

    def note(self, kind: str, target: str = "", *, lasts: float = 0.0, **more: object) -> Fault:
        """Write a fault into the history; the end of the fault changes `until`."""
        now = boottime()
        fault = Fault(kind=kind, at=now, until=now + lasts, target=target, **more)  # type: ignore[arg-type]
        self.history.faults.append(fault)
        return fault

    # Parts

    def start(self, part: Part) -> None:
        part.generation += 1
        python = sys.executable
        if part.name in SERVERS:
            command = [python, "-m", "torture.instrumented_cli", "serve", "--port", str(self.ports[part.name])]
        else:
            queues = f"default:{SLOTS}" + (f",{QUEUE}:1" if part.host != SMALL else "")
            command = [
                python, "-m", "torture.instrumented_cli", "worker", "--queue", queues, "--worker-id", part.id,
                "--app", "torture.functions:app",
            ]  # fmt: skip
        part.start(command, {**_plain_environment(), **self._settings(part)})

    def _settings(self, part: Part) -> dict[str, str]:
        url = self.url
        if part.name in self.proxies:
            url = url.replace(f":{self.postgres.port}/" if self.postgres else "", f":{self.proxies[part.name].port}/")
        named = {
            **SETTINGS,
            **self.settings,
            "DATABASE_URL": url,
            "DATA_DIR": self.folder / "parts" / part.name,
            "STATE_DIR": self.host(part.host),
            "SHARED_DIR": self.shared,
            "DOCKER_HOST": self.engine.host if self.engine else "none",
        }
        settings = {f"HOLDFAST_{name}": str(value) for name, value in named.items()}
        settings |= {
            "TORTURE_JOURNAL": str(self.journal),
            "TORTURE_WAITS": "" if self.calm or not self.waits else str(self.folder / "waits" / part.id),
            "TORTURE_CHANCE": str(self.waits),
            "TORTURE_STEP": self.step,
            "TORTURE_LINGER": "" if self.calm else self.lingers,
            "TORTURE_SEED": f"{self.history.seed}/{part.id}",
            "TORTURE_BREAK": self.breaking,
            "TORTURE_WITNESS": str(self.witness) if part.name in WORKERS else "",
            "TORTURE_PART": part.id,
        }
        shift = self.clocks.pop(part.name, None)
        if shift is not None and clocks.LIBRARY is not None:
            settings |= clocks.shifted(shift)
        return settings

    async def keep(self) -> None:
        """Repeatedly start dead processes that may live, and stop those that wait to be stopped."""
        stops: set[asyncio.Task[None]] = set()
        while True:
            for part in self.parts.values():
                if part.struck:
                    continue
                if not part.alive and boottime() >= part.up_at:
                    self._note_exit(part)
                    self.start(part)
                elif (waits := self.folder / "waits" / part.id).exists():
                    if self.calm or self._struck_workers() >= MOST_STOPPED:
                        waits.unlink(missing_ok=True)
                        continue
                    part.struck = True
                    task = asyncio.create_task(self.stop(part, waits=waits))
                    stops.add(task)
                    task.add_done_callback(stops.discard)
            await asyncio.sleep(0.05)

    def _note_exit(self, part: Part) -> None:
        if part.process is not None:
            process_exit = ProcessExit(
                part=part.id, at=boottime(), status=part.process.returncode, words=part.last_words
            )
            self.history.exits.append(process_exit)

    def _struck_workers(self) -> int:
        return sum(part.struck for part in self.workers)

    async def stop(self, part: Part, *, waits: Path | None = None, careful: bool = True) -> None:
        """Stop a part for longer than a lease lasts, and let it go on.

        `careful`: not while it writes to a SQLite database, which would stop everybody else.
        """
        part.struck = True
        kind = "stop worker" if part in self.workers else "stop server"
        fault = self.note(kind, part.id, lasts=FOREVER)
        if not careful and self.postgres is None:
            fault.kind = "stopped writer"
        try:
            async with self._no_writer() if careful else contextlib.nullcontext():
                part.signal(signal.SIGSTOP)
                while part.alive and state(part.pid) != "T":  # noqa: ASYNC110 - the kernel sends no event
                    await asyncio.sleep(0.001)
            if waits is not None:
                os.unlink(waits)
            await asyncio.sleep(TTL * self.rng.uniform(1.1, 2.2))
        finally:
            part.signal(signal.SIGCONT)
            fault.until = boottime()
            part.struck = False

    async def watch_itself(self) -> None:
        """Note when the harness got no turn: what its proxies carry stood still then."""
        while True:
            due = boottime() + TICK
            await asyncio.sleep(TICK)
            if (now := boottime()) > due + LATE:
                self.history.lags.append(Lag(HARNESS, due, now))

    @contextlib.asynccontextmanager
    async def _no_writer(self) -> AsyncIterator[None]:
        """Nobody else writes to the SQLite database while the block lasts."""
        if self.postgres is not None:
            yield
            return
        connection = sqlite3.connect(sqlite_path(self.url), timeout=60, isolation_level=None, check_same_thread=False)
        with contextlib.closing(connection):
            await asyncio.to_thread(connection.execute, "BEGIN IMMEDIATE")
            try:
                yield
            finally:
                connection.execute("ROLLBACK")

    async def ready(self) -> None:
        """Wait until every server answers; an installation that cannot start says why."""
        async with httpx.AsyncClient(timeout=5) as client:
            for server in SERVERS:
                while not await _answers(client, f"{self.url_of(server)}/readyz"):
                    part = self.parts[server]
                    if part.generation > MOST_STARTS:
                        raise RuntimeError(f"{server} does not start:\n{part.log.read_text()[-2000:]}")
                    await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all parts while the block lasts; afterwards they are dead."""
        (self.folder / "waits").mkdir()
        self.folder.chmod(0o711)
        self.journal.touch()
        self.journal.chmod(0o666)
        async with contextlib.AsyncExitStack() as stack:
            for name, host in WORKERS.items():
                self.parts[name] = Part(name, "a" if self.one_host else host, self.folder / f"{name}.log")
            for name in SERVERS:
                self.parts[name] = Part(name, "server", self.folder / f"{name}.log")
                self.ports[name] = free_port()
            if self.postgres is not None:
                for name in self.parts.keys() - {DIRECT}:
                    self.proxies[name] = await stack.enter_async_context(Proxy(self.postgres.port).run())
            keeper, witness = asyncio.create_task(self.keep()), asyncio.create_task(self.watch_itself())
            stack.callback(self.end)
            stack.callback(keeper.cancel)
            stack.callback(witness.cancel)
            yield

    def mended(self) -> list[str]:
        """What parts say they had to mend: each is a bug that a duty has hidden."""
        return [line for line in self._said() if MENDED in line]

    def deadlocks(self) -> list[str]:
        """What the database says of transactions that waited for each other."""
        said = self.postgres.log.read_text(errors="replace").splitlines() if self.postgres is not None else []
        return ["\n".join(said[n : n + DETAILS]) for n, line in enumerate(said) if DEADLOCK in line]

    def made(self) -> dict[str, str]:
        """What children left as their artifacts, by job, attempt and token."""
        files = (self.shared / "artifacts").glob("*/*/made")
        return {f"{path.parts[-3]}/{path.parts[-2]}": path.read_text().strip() for path in files}

    def files_of(self, job: str) -> list[str]:
        """The files of a job in the folder that all hosts share: what it was given, and what it left."""
        kept = [self.shared / name / job for name in ("artifacts", "inputs")]
        return sorted(str(path.relative_to(self.shared)) for place in kept for path in _below(place))

    def jobs_with_files(self) -> list[str]:
        """The jobs that have files in the folder that all hosts share."""
        return sorted({path.name for name in ("artifacts", "inputs") for path in (self.shared / name).glob("*")})

    def damaged(self) -> list[str]:
        """The snapshots that workers say are not what was published."""
        return [found.group(1) for line in self._said() if (found := DAMAGED.search(line))]

    def _said(self) -> Iterator[str]:
        return (line for part in self.parts.values() for line in part.log.read_text(errors="replace").splitlines())

    def end(self) -> None:
        """Kill all parts, for good."""
        for part in self.parts.values():
            part.struck = True
            part.kill()


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await client.get(url)).status_code == 200
    return False


def _below(place: Path) -> Iterator[Path]:
    """A folder, if it is there, and all that is in it. Somebody may be removing it."""
    if place.exists():
        yield place
    for parent, folders, files in os.walk(place):
        yield from (Path(parent, name) for name in (*folders, *files))


def _plain_environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
