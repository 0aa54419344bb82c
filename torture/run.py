"""One run: start the installation, run clients and faults, wait until all jobs have ended, and read what happened."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster import FAST, Server
from tests.support.docker_engine import daemon

from holdfast.assemble import ANSWER_SHARE, store_of
from holdfast.client.http import AsyncClient
from holdfast.config import Settings
from holdfast.store.migrate import migrate
from holdfast.store.store import connect
from torture.calls import OnStore, OverHttp, Recorder
from torture.clients import Known, delete_on, follow_on, revive_on, stop_on, submit_on
from torture.faults import inject_faults
from torture.final_state import read_database
from torture.history import History, SurvivingProcess, boottime, read_journal, read_probe
from torture.installation import DATA, DIRECT, SMALL, TTL, Installation
from torture.jobs import JobGenerator, Profile
from torture.pipelines import KnownSnapshots, read_outputs, read_snapshots, remove_on
from torture.processes import children, containers, kill
from torture.simulated_operator import Operator

DISKS = {SMALL: 24 << 20, DATA: 2 << 30}
CLIENTS = 6
ANSWER = 10.0
QUIET = 150.0
"""Seconds without any job's end, after which a run that should come to rest is called stuck: more than what waits
longest for an answer, a call to a Docker engine that is busy."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    store: str
    seconds: float
    runners: Sequence[str] = ("process",)
    pause: float = 1.0
    """Seconds between two faults, on average."""
    faults: Sequence[str] = ()
    """The faults to strike with, by name; empty: all of them."""
    waits: float = 0.004
    """How often a worker waits at a step of an attempt, to be stopped there."""
    step: str = ""
    """The one step to wait at; empty: any."""
    profile: Profile = "mixed"
    lingers: str = ""
    """The statement after which transactions linger, on Postgres."""
    one_host: bool = False
    """Whether all workers are on one host."""
    breaking: str = ""


async def run(plan: Plan) -> History:
    """Run a plan and return its history."""
    history = History(seed=plan.seed, store=plan.store, ttl=TTL)
    async with running_installation(
        history,
        plan.store,
        docker="docker" in plan.runners,
        waits=plan.waits,
        step=plan.step,
        lingers=plan.lingers,
        one_host=plan.one_host,
        breaking=plan.breaking,
    ) as installation:
        await _torture(installation, plan)
        installation.end()
        history.lines = read_journal(installation.journal)
        read_probe(installation.witness, history)
        left = [
            *children(installation.folder),
            *(child for _, child in (containers(installation.engine) if installation.engine else ())),
        ]
        history.alive = [SurvivingProcess(child.job, child.attempt, child.pid) for child in left]
        history.mended = installation.mended()
        history.made = installation.made()
        history.deadlocks = installation.deadlocks()
        history.damaged = installation.damaged()
        await read_database(installation.url, history)
        gone = [job for job in installation.jobs_with_files() if job not in history.records]
        history.files = {job: installation.files_of(job) for job in gone}
        await read_snapshots(installation)
        read_outputs(installation)
    return history


@contextlib.asynccontextmanager
async def running_installation(
    history: History,
    store: str,
    *,
    docker: bool = False,
    settings: Mapping[str, str] | None = None,
    postgres_settings: Sequence[str] = (),
    waits: float = 0.0,
    step: str = "",
    lingers: str = "",
    one_host: bool = False,
    breaking: str = "",
) -> AsyncIterator[Installation]:
    """An installation that runs while the block lasts, on a new database; afterwards nothing of it is left.

    Nor when the process is told to end: its task, which must not change meanwhile, is cancelled then.
    """
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_folder()))
        disks = stack.enter_context(_disks({SMALL: folder / "hosts" / SMALL, DATA: folder / "data"}))
        postgres = stack.enter_context(_postgres(postgres_settings)) if store == "postgres" else None
        url = f"sqlite:///{folder / 'data' / 'store.db'}" if postgres is None else postgres.url
        database = await connect(url, listen=False)
        await migrate(database)
        await database.close()
        installation = Installation(
            folder=folder, url=url, history=history, rng=random.Random(f"{history.seed}/world"), postgres=postgres,
            engine=stack.enter_context(daemon(live_restore=True)) if docker else None, settings=settings or {},
            disks=disks, breaking=breaking, waits=waits, step=step,
            lingers=lingers, one_host=one_host,
        )  # fmt: skip
        async with installation.running():
            await installation.ready()
            yield installation


async def _torture(installation: Installation, plan: Plan) -> None:
    known, shelf, upload = Known(), KnownSnapshots(), await _upload(installation)

    def rng(name: str) -> random.Random:
        return random.Random(f"{plan.seed}/{name}")

    async with (
        asyncio.TaskGroup() as group,
        _journal_server(installation) as port,
        _recorders(installation, rng("calls")) as (callers, person),
    ):
        operator = Operator(installation, person, known, rng("janitor"))
        keeping = [group.create_task(operator.keep()), group.create_task(operator.count_on())]
        tending = [group.create_task(operator.tend_engine())] if installation.engine else []
        tasks = [group.create_task(inject_faults(installation, rng("faults"), pause=plan.pause, only=plan.faults))]
        for n, recorder in enumerate(callers):
            draw = JobGenerator(
                rng(f"draw {n}"), plan.runners, str(installation.journal), port, plan.profile, shelf, upload
            )
            tasks.append(group.create_task(submit_on(installation, recorder, draw, known, rng(f"client {n}"))))
        tasks.append(group.create_task(stop_on(installation, callers[0], known, rng("stops"))))
        if plan.profile in ("mixed", "files"):
            tasks.append(group.create_task(delete_on(installation, callers[1], known, rng("deletes"))))
        if plan.profile in ("mixed", "budgets", "builds"):
            draw = JobGenerator(rng("draw builds"), plan.runners, str(installation.journal), port)
            tasks.append(group.create_task(revive_on(installation, callers[2], draw, rng("revivals"))))
        tasks += [group.create_task(follow_on(installation, known, rng(f"follower {n}"))) for n in range(2)]
        if "pipeline" in plan.runners:
            tasks += [
                group.create_task(shelf.look(installation)),
                group.create_task(remove_on(installation, shelf, rng("removals"))),
            ]
        await asyncio.sleep(plan.seconds)
        installation.calm = True
        await asyncio.gather(*tasks)
        for task in keeping:
            task.cancel()
        await _come_to_rest(operator)
        for task in tending:
            task.cancel()


async def _upload(installation: Installation) -> str:
    """Upload a file that jobs are given."""
    file = installation.folder / "given"
    file.write_text("given\n")
    client = AsyncClient(installation.url_of(DIRECT))
    try:
        return await client.upload(file)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _recorders(installation: Installation, rng: random.Random) -> AsyncIterator[tuple[list[Recorder], Recorder]]:
    """Clients over HTTP, clients on the store, and the operator's own connection."""
    settings = Settings(
        database_url=installation.url, state_dir=installation.host("client"), shared_dir=installation.shared,
        docker_host=None, lease_ttl=ANSWER_SHARE * ANSWER, heartbeat_interval=ANSWER,
    )  # fmt: skip
    async with await store_of(settings, listen=False) as store:
        direct = Recorder(installation.history, OnStore(store), installation.files_of)
        callers = [OverHttp(installation, rng) for _ in range(CLIENTS)]
        yield [*(Recorder(installation.history, caller, installation.files_of) for caller in callers), direct], direct
        for caller in callers:
            await caller.close()


async def _come_to_rest(operator: Operator) -> None:
    """Let all jobs end, with a person's help; give up when nothing ends any more."""
    left, since = -1, boottime()
    while True:
        with contextlib.suppress(OSError):
            await operator.look()
            now = await operator.live()
            if now == 0:
                return
            if now != left:
                left, since = now, boottime()
        if boottime() - since > QUIET:
            return
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def _journal_server(installation: Installation) -> AsyncIterator[int]:
    """Take lines of the journal from containers, which have no other way out."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if line.endswith(b"\n"):
            with installation.journal.open("ab", buffering=0) as journal:
                journal.write(line)
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder for everything; whatever still runs in it afterwards is killed."""
    with tempfile.TemporaryDirectory(prefix="holdfast-torture-", ignore_cleanup_errors=True) as folder:
        try:
            yield folder
        finally:
            for child in children(Path(folder)):
                kill(child.pid)


@contextlib.contextmanager
def _postgres(settings: Sequence[str]) -> Iterator[Server]:
    server = Server([*FAST, *settings])
    try:
        server.start()
        yield server
    finally:
        server.remove()


@contextlib.contextmanager
def _disks(wanted: Mapping[str, Path]) -> Iterator[Mapping[str, Path]]:
    """Make these folders, each on a disk of its own that can be filled, where root and loop devices work."""
    made: dict[str, Path] = {}
    try:
        for name, target in wanted.items():
            target.mkdir(parents=True)
            if os.geteuid() == 0 and _mounted(target, DISKS[name]):
                made[name] = target
        if len(made) < len(wanted):
            print("no full disks in this run: they need root, mkfs.ext4 and loop devices")
        yield made
    finally:
        for target in made.values():
            subprocess.run(["umount", "-l", str(target)], check=False)


def _mounted(target: Path, size: int) -> bool:
    image = target.with_name(f"{target.name}.image")
    with image.open("wb") as file:
        file.truncate(size)
    commands = (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(target)])
    return shutil.which("mkfs.ext4") is not None and all(
        subprocess.run(command, check=False, capture_output=True).returncode == 0 for command in commands
    )
