"""One run: build the world, let clients and faults loose on it, let it come to rest, and read what happened."""

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
from tests.support.engine import daemon

from holdfast.assemble import ANSWER_SHARE, store_of
from holdfast.client.http import AsyncClient
from holdfast.config import Settings
from holdfast.store.migrate import migrate
from holdfast.store.store import connect
from torture.calls import OnStore, OverHttp, Recorder
from torture.clients import Known, delete_on, follow_on, revive_on, stop_on, submit_on
from torture.faults import torment
from torture.final import read_database
from torture.history import Alive, History, boottime, read_journal, read_witness
from torture.janitor import Janitor
from torture.jobs import Draw, Profile
from torture.pipelines import Shelf, read_outputs, read_snapshots, remove_on
from torture.processes import children, containers, kill
from torture.world import DATA, DIRECT, SMALL, TTL, World

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
    """The statement behind which transactions linger, on Postgres."""
    one_host: bool = False
    """Whether all workers are on one host."""
    breaking: str = ""


async def run(plan: Plan) -> History:
    """Run a plan and return its history."""
    history = History(seed=plan.seed, store=plan.store, ttl=TTL)
    async with in_a_world(
        history,
        plan.store,
        docker="docker" in plan.runners,
        waits=plan.waits,
        step=plan.step,
        lingers=plan.lingers,
        one_host=plan.one_host,
        breaking=plan.breaking,
    ) as world:
        await _torture(world, plan)
        world.end()
        history.lines = read_journal(world.journal)
        read_witness(world.witness, history)
        left = [*children(world.folder), *(child for _, child in (containers(world.engine) if world.engine else ()))]
        history.alive = [Alive(child.job, child.attempt, child.pid) for child in left]
        history.mended = world.mended()
        history.made = world.made()
        history.deadlocks = world.deadlocks()
        history.damaged = world.damaged()
        await read_database(world.url, history)
        gone = [job for job in world.jobs_with_files() if job not in history.records]
        history.files = {job: world.files_of(job) for job in gone}
        await read_snapshots(world)
        read_outputs(world)
    return history


@contextlib.asynccontextmanager
async def in_a_world(
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
) -> AsyncIterator[World]:
    """A world that runs while the block lasts, on a new database; afterwards nothing of it is left.

    Nor when the process is told to end: its task, which must not change meanwhile, is cancelled then.
    """
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(_folder()))
        disks = held.enter_context(_disks({SMALL: folder / "hosts" / SMALL, DATA: folder / "data"}))
        postgres = held.enter_context(_postgres(postgres_settings)) if store == "postgres" else None
        url = f"sqlite:///{folder / 'data' / 'store.db'}" if postgres is None else postgres.url
        database = await connect(url, listen=False)
        await migrate(database)
        await database.close()
        world = World(
            folder=folder, url=url, history=history, rng=random.Random(f"{history.seed}/world"), postgres=postgres,
            engine=held.enter_context(daemon(live_restore=True)) if docker else None, settings=settings or {},
            disks=disks, breaking=breaking, waits=waits, step=step,
            lingers=lingers, one_host=one_host,
        )  # fmt: skip
        async with world.running():
            await world.ready()
            yield world


async def _torture(world: World, plan: Plan) -> None:
    known, shelf, upload = Known(), Shelf(), await _upload(world)

    def rng(name: str) -> random.Random:
        return random.Random(f"{plan.seed}/{name}")

    async with asyncio.TaskGroup() as group, _journal_server(world) as port, _recorders(world, rng("calls")) as (
        callers, person,
    ):  # fmt: skip
        janitor = Janitor(world, person, known, rng("janitor"))
        keeping = [group.create_task(janitor.keep()), group.create_task(janitor.count_on())]
        tending = [group.create_task(janitor.tend_engine())] if world.engine else []
        tasks = [group.create_task(torment(world, rng("faults"), pause=plan.pause, only=plan.faults))]
        for n, recorder in enumerate(callers):
            draw = Draw(rng(f"draw {n}"), plan.runners, str(world.journal), port, plan.profile, shelf, upload)
            tasks.append(group.create_task(submit_on(world, recorder, draw, known, rng(f"client {n}"))))
        tasks.append(group.create_task(stop_on(world, callers[0], known, rng("stops"))))
        if plan.profile in ("mixed", "files"):
            tasks.append(group.create_task(delete_on(world, callers[1], known, rng("deletes"))))
        if plan.profile in ("mixed", "budgets", "builds"):
            draw = Draw(rng("draw builds"), plan.runners, str(world.journal), port)
            tasks.append(group.create_task(revive_on(world, callers[2], draw, rng("revivals"))))
        tasks += [group.create_task(follow_on(world, known, rng(f"follower {n}"))) for n in range(2)]
        if "pipeline" in plan.runners:
            tasks += [group.create_task(shelf.look(world)), group.create_task(remove_on(world, shelf, rng("removals")))]
        await asyncio.sleep(plan.seconds)
        world.calm = True
        await asyncio.gather(*tasks)
        for task in keeping:
            task.cancel()
        await _come_to_rest(janitor)
        for task in tending:
            task.cancel()


async def _upload(world: World) -> str:
    """Upload a file that jobs are given."""
    file = world.folder / "given"
    file.write_text("given\n")
    client = AsyncClient(world.url_of(DIRECT))
    try:
        return await client.upload(file)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _recorders(world: World, rng: random.Random) -> AsyncIterator[tuple[list[Recorder], Recorder]]:
    """Clients over HTTP, clients on the store, and the janitor's own way in."""
    settings = Settings(
        database_url=world.url, state_dir=world.host("client"), shared_dir=world.shared, docker_host=None,
        lease_ttl=ANSWER_SHARE * ANSWER, heartbeat_interval=ANSWER,
    )  # fmt: skip
    async with await store_of(settings, listen=False) as store:
        direct = Recorder(world.history, OnStore(store), world.files_of)
        callers = [OverHttp(world, rng) for _ in range(CLIENTS)]
        yield [*(Recorder(world.history, caller, world.files_of) for caller in callers), direct], direct
        for caller in callers:
            await caller.close()


async def _come_to_rest(janitor: Janitor) -> None:
    """Let all jobs end, with a person's help; give up when nothing ends any more."""
    left, since = -1, boottime()
    while True:
        with contextlib.suppress(OSError):
            await janitor.look()
            now = await janitor.live()
            if now == 0:
                return
            if now != left:
                left, since = now, boottime()
        if boottime() - since > QUIET:
            return
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def _journal_server(world: World) -> AsyncIterator[int]:
    """Take lines of the journal from containers, which have no other way out."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if line.endswith(b"\n"):
            with world.journal.open("ab", buffering=0) as journal:
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
