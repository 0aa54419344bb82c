"""The faults: each one starts, lasts for a while and ends, and is recorded in the history."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import asyncpg

from torture import clocks
from torture.final_state import fetch
from torture.history import boottime
from torture.installation import FOREVER, TTL, Installation
from torture.processes import Part, children, containers, kill

Strike = Callable[[Installation, random.Random], Awaitable[None]]
UNTOUCHED = ("is not running", "No such container")
"""What an engine says when there was nothing to kill; after any other word of it there may have been."""
SPARE = 8 << 20
"""Bytes of a disk that are filled by writing: what a file system needs for itself cannot be taken in one piece."""
LEADER = "SELECT leader FROM {schema}leaders"


def _any_worker(installation: Installation, rng: random.Random) -> Part | None:
    """Return a live worker that no other fault uses."""
    free = [part for part in installation.workers if part.alive and not part.struck]
    return rng.choice(free) if free else None


async def kill_worker(installation: Installation, rng: random.Random) -> None:
    if (part := _any_worker(installation, rng)) is not None:
        part.up_at = boottime() + rng.choice([0.0, 0.5, 2.0, 6.0])
        installation.note("kill worker", part.id, lasts=FOREVER)
        part.kill()


async def stop_worker(installation: Installation, rng: random.Random) -> None:
    if (part := _any_worker(installation, rng)) is not None:
        await installation.stop(part)


async def stop_a_writer(installation: Installation, rng: random.Random) -> None:
    """Stop a worker at any point: on SQLite perhaps in the middle of a write, which blocks everyone."""
    if (part := _any_worker(installation, rng)) is not None:
        await installation.stop(part, careful=False)


async def end_worker(installation: Installation, rng: random.Random) -> None:
    """Tell a worker to leave; it hands over."""
    if (part := _any_worker(installation, rng)) is not None:
        part.up_at = boottime() + rng.choice([0.0, 1.0, 5.0])
        noted = part.id
        _tell(installation, part)
        if rng.random() < 0.2:
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            if part.id == noted:
                _tell(installation, part)


def _tell(installation: Installation, part: Part) -> None:
    """Tell a worker to leave. It may be leaving already, told by this fault or an earlier one: then it ends at once."""
    installation.note("end worker", part.id, lasts=FOREVER)
    part.signal(signal.SIGTERM)


async def stop_leader(installation: Installation, rng: random.Random) -> None:
    """Stop the leader of the duties: a worker or a server."""
    (found,) = await fetch(installation.url, LEADER)
    name = str(found[0]["leader"]) if found else ""
    for part in installation.parts.values():
        if part.alive and not part.struck and (part.id == name or f":{part.pid}:" in name):
            await installation.stop(part)
            return


async def kill_server(installation: Installation, rng: random.Random) -> None:
    part = rng.choice(installation.servers)
    if part.alive and not part.struck:
        part.up_at = boottime() + rng.choice([0.0, 1.0, 3.0])
        installation.note("kill server", part.id)
        part.kill()


async def end_server(installation: Installation, rng: random.Random) -> None:
    part = rng.choice(installation.servers)
    if part.alive and not part.struck:
        installation.note("end server", part.id)
        part.signal(signal.SIGTERM)


async def kill_supervisor(installation: Installation, rng: random.Random) -> None:
    """Kill a supervisor. Its child dies with it; processes that left the child's session do not."""
    found = [child for child in await asyncio.to_thread(list, children(installation.folder)) if child.supervisor]
    if found:
        child = rng.choice(found)
        installation.note("kill supervisor", attempts=[(child.job, child.attempt)])
        kill(child.pid)


@contextlib.contextmanager
def _workers_killed(installation: Installation, rng: random.Random) -> Iterator[str | None]:
    """Kill the workers of some host, and keep them from coming back meanwhile; None where another fault has one."""
    host = rng.choice(["b", "d"])
    parts = [part for part in installation.workers if part.host == host]
    if host in installation.dead_hosts or any(part.struck for part in parts):
        yield None
        return
    for part in parts:
        part.struck = True
        installation.note("kill worker", part.id, lasts=FOREVER)
        part.kill()
    try:
        yield host
    finally:
        for part in parts:
            part.struck = False


async def kill_host(installation: Installation, rng: random.Random) -> None:
    """Kill a host: its workers and all that they ran. It comes back after a while."""
    with _workers_killed(installation, rng) as host:
        if host is None:
            return
        fault = installation.note("kill host", host)
        struck: set[tuple[str, int]] = set()
        while found := await asyncio.to_thread(list, children(installation.host(host))):
            for child in found:
                struck.add((child.job, child.attempt))
                kill(child.pid)
        fault.attempts = sorted(struck)
        installation.dead_hosts.add(host)
        try:
            await asyncio.sleep(rng.uniform(1.0, 3.0) * TTL)
        finally:
            installation.dead_hosts.discard(host)
            fault.until = boottime()


async def desert_host(installation: Installation, rng: random.Random) -> None:
    """Kill a host's workers and let its children run, with no worker to renew or adopt them."""
    with _workers_killed(installation, rng) as host:
        if host is None:
            return
        fault = installation.note("deserted host", host, lasts=FOREVER)
        try:
            await asyncio.sleep(rng.uniform(2.0, 5.0) * TTL)
        finally:
            fault.until = boottime()


async def starve(installation: Installation, rng: random.Random) -> None:
    """Keep all processors busy for a while."""
    fault = installation.note("starve", lasts=FOREVER)
    with _burning(2 * (os.cpu_count() or 1)):
        await asyncio.sleep(rng.uniform(1.0, 3.0))
    fault.until = boottime()


@contextlib.contextmanager
def _burning(count: int) -> Iterator[None]:
    burners = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


async def fill_disk(installation: Installation, rng: random.Random) -> None:
    """Fill a disk, for a while: the one of host d, or the one with all data."""
    if not installation.disks:
        return
    name = rng.choice(list(installation.disks))
    ballast = installation.disks[name] / "ballast"
    if ballast.exists():
        return
    fault = installation.note("full disk", name, lasts=FOREVER)
    try:
        await asyncio.to_thread(_fill, ballast)
        await asyncio.sleep(rng.uniform(1.0, 4.0))
    finally:
        ballast.unlink(missing_ok=True)
        fault.until = boottime()


def _fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        free = os.statvfs(ballast)
        with contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, free.f_bfree * free.f_bsize - SPARE)
        file.seek(0, os.SEEK_END)
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


# Postgres


async def restart_postgres(installation: Installation, rng: random.Random) -> None:
    """Restart the database: its clients are sent away, or it crashes."""
    await _take_away(installation, rng, rng.choice([0.0, 0.0, 1.0]))


async def take_postgres_away(installation: Installation, rng: random.Random) -> None:
    """Stop the database for longer than a lease lasts, so that no worker can beat."""
    await _take_away(installation, rng, TTL * rng.uniform(1.2, 2.0))


async def _take_away(installation: Installation, rng: random.Random, seconds: float) -> None:
    assert installation.postgres is not None
    if installation.postgres_struck:
        return
    installation.postgres_struck = True
    crash = rng.random() < 0.5
    fault = installation.note("crash of Postgres" if crash else "restart of Postgres", lasts=FOREVER)
    try:
        await asyncio.to_thread(installation.postgres.stop, signal.SIGQUIT if crash else signal.SIGINT)
        await asyncio.sleep(seconds)
    finally:
        await asyncio.to_thread(installation.postgres.start)
        fault.until = boottime()
        installation.postgres_struck = False


async def terminate_backends(installation: Installation, rng: random.Random) -> None:
    """End some of the database's connections."""
    installation.note("backends ended")
    connection = await asyncpg.connect(installation.url)
    try:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend' AND random() < $1",
            rng.choice([0.2, 0.5, 1.0]),
        )
    finally:
        await connection.close()


async def partition(installation: Installation, rng: random.Random) -> None:
    """Cut one worker or server off: old and new connections swallow what it sends."""
    part = _any_part(installation, rng)
    proxy = installation.proxies[part.name]
    if proxy.cut_off or part.struck:
        return
    fault = installation.note("partition", part.id, lasts=FOREVER)
    proxy.cut_off = True
    proxy.swallow()
    try:
        await asyncio.sleep(TTL * rng.uniform(0.3, 2.0))
    finally:
        proxy.cut_off = False
        proxy.swallow()
        fault.until = boottime() + TTL / 2


def _any_part(installation: Installation, rng: random.Random) -> Part:
    """One that reaches Postgres through a proxy: mostly a worker."""
    return installation.parts[rng.choice(list(installation.proxies))]


async def slow_network(installation: Installation, rng: random.Random) -> None:
    part = _any_part(installation, rng)
    proxy = installation.proxies[part.name]
    fault = installation.note("slow partition", part.id, lasts=FOREVER)
    proxy.delay = rng.uniform(0.05, 0.8)
    try:
        await asyncio.sleep(rng.uniform(1.0, 4.0))
    finally:
        proxy.delay = 0.0
        fault.until = boottime()


async def slow_everybody(installation: Installation, rng: random.Random) -> None:
    """Add latency for every process, so that transactions last longer and overlap."""
    fault = installation.note("latency", lasts=FOREVER)
    for proxy in installation.proxies.values():
        proxy.delay = rng.uniform(0.01, 0.04)
    try:
        await asyncio.sleep(rng.uniform(2.0, 6.0))
    finally:
        for proxy in installation.proxies.values():
            proxy.delay = 0.0
        fault.until = boottime()


async def half_close(installation: Installation, rng: random.Random) -> None:
    part = _any_part(installation, rng)
    installation.note("half-close", part.id)
    installation.proxies[part.name].half_close()


async def shift_clock(installation: Installation, rng: random.Random) -> None:
    """Give a worker a clock that is hours off, until it is started again."""
    part = _any_worker(installation, rng)
    if part is not None and clocks.LIBRARY is not None:
        installation.clocks[part.name] = rng.choice(["+6h", "-6h", "+3m", "-3m"])
        installation.note("kill worker", part.id, lasts=FOREVER)
        installation.note("shifted clock", f"{part.name}.{part.generation + 1}")
        part.kill()


# Docker


async def restart_engine(installation: Installation, rng: random.Random) -> None:
    """Stop or kill the container engine, and start it again; its containers run on."""
    assert installation.engine is not None
    if installation.engine_struck:
        return
    installation.engine_struck = True
    crash = rng.random() < 0.5
    fault = installation.note("crash of dockerd" if crash else "restart of dockerd", lasts=FOREVER)
    try:
        await asyncio.to_thread(installation.engine.kill if crash else installation.engine.stop)
        await asyncio.sleep(rng.choice([0.0, 2.0, 2 * TTL]))
    finally:
        await asyncio.to_thread(installation.engine.start)
        fault.until = boottime()
        installation.engine_struck = False


async def kill_container(installation: Installation, rng: random.Random) -> None:
    """Kill a container: the child and its supervisor."""
    assert installation.engine is not None
    with contextlib.suppress(subprocess.CalledProcessError):
        found = await asyncio.to_thread(containers, installation.engine)
        if found:
            name, child = rng.choice(found)
            try:
                await asyncio.to_thread(installation.engine.docker, "kill", name)
            except subprocess.CalledProcessError as error:
                if any(words in str(error.stderr) for words in UNTOUCHED):
                    return
            installation.note("kill container", attempts=[(child.job, child.attempt)])


EVERYWHERE: dict[Strike, float] = {
    kill_worker: 4, stop_worker: 4, end_worker: 2, stop_leader: 1.5, kill_server: 1, end_server: 1, kill_supervisor: 4,
    kill_host: 1, desert_host: 0.7, starve: 0.7, fill_disk: 1,
}  # fmt: skip
ON_SQLITE: dict[Strike, float] = {stop_a_writer: 0.5}
ON_POSTGRES: dict[Strike, float] = {
    restart_postgres: 0.8, take_postgres_away: 0.3, terminate_backends: 3, partition: 3, slow_network: 2,
    slow_everybody: 1, half_close: 3, shift_clock: 1,
}  # fmt: skip

ON_DOCKER: dict[Strike, float] = {restart_engine: 2, kill_container: 2}


async def inject_faults(
    installation: Installation, rng: random.Random, *, pause: float, only: Sequence[str] = ()
) -> None:
    """Start a random fault about every `pause` seconds until the calm, then wait for all of them to end."""
    possible = {**EVERYWHERE, **(ON_SQLITE if installation.postgres is None else ON_POSTGRES)}
    possible |= ON_DOCKER if installation.engine is not None else {}
    strikes = {strike: weight for strike, weight in possible.items() if not only or strike.__name__ in only}
    async with asyncio.TaskGroup() as group:
        while not installation.calm:
            await asyncio.sleep(rng.expovariate(1 / pause))
            if not installation.calm:
                (strike,) = rng.choices(list(strikes), weights=list(strikes.values()))
                group.create_task(_safely(strike, installation, rng))


async def _safely(strike: Strike, installation: Installation, rng: random.Random) -> None:
    """Ignore a fault that fails because of another one."""
    with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
        await strike(installation, rng)
