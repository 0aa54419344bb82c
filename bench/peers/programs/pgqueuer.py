"""PgQueuer: asyncpg, uvloop, batches of 1,000, one connection per worker, as its own benchmark has it."""

import asyncio
import signal
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench.peers.programs.serve import ready, run, stamp
from pgqueuer import PgQueuer

BATCH = 1000
DAY = timedelta(days=1)


class PgQueuerProgram:
    def __init__(self, url: str) -> None:
        self._url = url

    async def install(self) -> None:
        await self.open()
        await self._queries.install()
        await self.close()

    async def open(self) -> None:
        self._connection = await asyncpg.connect(self._url)
        self._queries = Queries(AsyncpgDriver(self._connection))

    async def bulk(self, count: int, at: int | None) -> None:
        name, payload = _job(at)
        await self._queries.enqueue([name] * count, [payload] * count, [0] * count)

    async def one(self, at: int | None) -> None:
        name, payload = _job(at)
        await self._queries.enqueue(name, payload)

    async def future(self, count: int) -> None:
        await self._queries.enqueue(["noop"] * count, [None] * count, [0] * count, [DAY] * count)

    async def close(self) -> None:
        await self._connection.close()

    async def work(self) -> None:
        await self.open()
        queue = PgQueuer(AsyncpgDriver(self._connection))

        @queue.entrypoint("noop")
        async def noop(job: Job) -> None:
            pass

        @queue.entrypoint("stamp")
        async def stamped(job: Job) -> None:
            stamp(int(job.payload or b"0"))

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, queue.shutdown.set)
        asyncio.get_running_loop().call_later(0.5, ready)
        await queue.run(batch_size=BATCH)


def _job(at: int | None) -> tuple[str, bytes | None]:
    return ("noop", None) if at is None else ("stamp", str(at).encode())


if __name__ == "__main__":
    run(PgQueuerProgram, uvloop.new_event_loop)
