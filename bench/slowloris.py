"""Requests of others while thousands of connections never finish theirs.

A `holdfast serve` on SQLite and one on Postgres, on the loopback. A second process opens 5,000 connections, sends half
a request on each and then a byte now and then, and opens those again that the server closes, for 15 seconds. Rounds
with and without it take turns, so that other work on the machine reaches both. Wanted: the 95th percentile of what
others wait, on a connection of their own per request, is at most twice that of an idle server.
"""

import asyncio
import contextlib
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.support.service import Service, service_process_on

from bench.figures import percentile
from bench.installation import empty_databases, load

SOCKETS = 5000
ROUNDS = 3
IDLE_SECONDS = 8.0
SECONDS = 15.0
WANTED = 2.0
LEAST_HELD = 4500
"""Connections that the server must have held at once, of the 8,000 that it allows: else this was no attack."""
PAUSE = 0.02


async def _attack(port: int, seconds: float) -> None:
    async def one(n: int) -> None:
        await asyncio.sleep(3.0 * n / SOCKETS)
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nX-A: ")
                while not reader.at_eof():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(5.0):
                            await reader.read(1)
                    writer.write(b"a")
                writer.close()
            await asyncio.sleep(1.0)

    tasks = [asyncio.create_task(one(n)) for n in range(SOCKETS)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _allow_descriptors() -> None:
    """Raise the limit of open files, which the attacker and the server inherit, as far as this user may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 3 * SOCKETS
    if most != resource.RLIM_INFINITY and most < SOCKETS + 100:
        raise SystemExit(
            f"{SOCKETS} sockets need as many open files, and this user may have {most}: raise `ulimit -Hn`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough if most == resource.RLIM_INFINITY else min(most, enough), most))


def _attacker(port: int, seconds: float) -> None:
    asyncio.run(_attack(port, seconds))


async def _waits(service: Service, seconds: float) -> list[float]:
    """How long each request of an honest client took, connection and all."""
    waits = []
    head = "GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {service.admin}\r\n\r\n"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(head.encode())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        writer.close()
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE)
    return waits


def _processor_seconds(service: Service) -> float:
    """What the server has used so far; unlike a wait, this does not depend on what else runs here."""
    assert service.process is not None
    fields = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _open_descriptors(service: Service) -> int:
    assert service.process is not None
    return len(os.listdir(f"/proc/{service.process.pid}/fd"))


async def _most_open(service: Service, stop: asyncio.Event) -> int:
    """The most descriptors that the server had open until `stop`: whether there was an attack at all."""
    most = 0
    while not stop.is_set():
        most = max(most, _open_descriptors(service))
        await asyncio.sleep(0.5)
    return most


async def _attacked(service: Service) -> tuple[list[float], float, int]:
    """Attack the server; return what others waited, its share of a processor, and how many connections it held."""
    before = _open_descriptors(service)
    attacker = multiprocessing.get_context("spawn").Process(target=_attacker, args=(service.port, SECONDS), daemon=True)
    attacker.start()
    stop = asyncio.Event()
    most = asyncio.create_task(_most_open(service, stop))
    await asyncio.sleep(1.0)
    began, used = time.monotonic(), _processor_seconds(service)
    waits = await _waits(service, SECONDS - 1.0)
    share = (_processor_seconds(service) - used) / (time.monotonic() - began)
    stop.set()
    held = await most - before
    await asyncio.to_thread(attacker.join, 60)
    if attacker.exitcode != 0 or held < LEAST_HELD:
        raise SystemExit(f"no attack: the attacker ended with {attacker.exitcode}, the server held {held} connections")
    return waits, share, held


async def measure(store: str, url: str, folder: Path) -> bool:
    """Take idle and attacked rounds in turns, on one server, and compare all of them."""
    idle: list[float] = []
    attacked: list[float] = []
    rounds: list[str] = []
    with service_process_on(url, folder) as service:
        await _waits(service, 1.0)
        for _ in range(ROUNDS):
            calm = await _waits(service, IDLE_SECONDS)
            rough, share, held = await _attacked(service)
            await _waits(service, 1.0)  # What the attacker left open is closed meanwhile.
            ratio = percentile(rough, 0.95) / percentile(calm, 0.95)
            rounds.append(f"{ratio:.2f} with {held} held at {share:.0%} of a processor")
            idle += calm
            attacked += rough
        log = service.log.stat().st_size
    one, other = percentile(idle, 0.95), percentile(attacked, 0.95)
    ratio = other / one
    print(
        f"{store}: idle p95 {one * 1e3:.1f} ms; with {SOCKETS} half-open requests p95 {other * 1e3:.1f} ms, "
        f"{len(attacked)} answers; ratio {ratio:.2f} (rounds: {'; '.join(rounds)}), wanted at most {WANTED:g}; "
        f"log {log} bytes; {load()}",
        flush=True,
    )
    return ratio <= WANTED


async def main(stores: list[str]) -> bool:
    _allow_descriptors()
    good = True
    async with empty_databases(stores) as new:
        for store in stores:
            with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
                good = await measure(store, await new(store), Path(folder)) and good
    return good


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main(sys.argv[1:] or ["sqlite", "postgres"])) else 1)
