"""Requests of others while thousands of connections never finish theirs.

A `holdfast serve` on SQLite, on the loopback. A second process opens 5,000 connections, sends half a request on each
and then a byte now and then, and opens those again that the server closes, for 15 seconds. Wanted: the 95th percentile
of what others wait, on a connection of their own per request, is at most twice that of an idle server.
"""

import asyncio
import contextlib
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

from tests.service import Served, serving

from bench.figures import percentile
from holdfast.store.migrate import migrate
from holdfast.store.store import connect

SOCKETS = 5000
SECONDS = 15.0
WANTED = 2.0
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


def _attacker(port: int, seconds: float) -> None:
    asyncio.run(_attack(port, seconds))


async def _waits(served: Served, seconds: float) -> list[float]:
    """How long each request of an honest client took, connection and all."""
    waits = []
    head = "GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {served.admin}\r\n\r\n"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(head.encode())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        writer.close()
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE)
    return waits


async def main() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/holdfast.db"
        database = await connect(url)
        await migrate(database)
        await database.close()
        with serving(url, Path(folder) / "data") as served:
            await _waits(served, 1.0)
            idle = percentile(await _waits(served, 5.0), 0.95)
            attacker = multiprocessing.get_context("spawn").Process(
                target=_attacker, args=(served.port, SECONDS), daemon=True
            )
            attacker.start()
            await asyncio.sleep(1.0)
            found = await _waits(served, SECONDS - 1.0)
            attacker.join(30)
            attacked = percentile(found, 0.95)
            log = served.log.stat().st_size
    ratio = attacked / idle
    print(f"idle: p95 {idle * 1e3:.1f} ms; with {SOCKETS} half-open requests: p95 {attacked * 1e3:.1f} ms, ", end="")
    print(f"{len(found)} answers; ratio {ratio:.2f}, wanted at most {WANTED:g}; log {log} bytes")
    return ratio <= WANTED


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
