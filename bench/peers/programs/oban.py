"""oban-py: uvloop as its command line has it, 100 jobs at once, a pool of 10 connections."""

import asyncio
import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import uvloop
from oban import Oban, worker
from oban.schema import install

from bench.peers.programs.serve import ready, run, stamp

LIMIT = 100
POOL = 10


@worker(queue="default")
class Noop:
    async def process(self, job: Any) -> None:
        pass


@worker(queue="default")
class Stamp:
    async def process(self, job: Any) -> None:
        stamp(job.args["at"])


class ObanProgram:
    def __init__(self, url: str) -> None:
        self._url = url

    async def install(self) -> None:
        pool = await Oban.create_pool(self._url, min_size=1, max_size=POOL)
        await install(pool)
        await pool.close()

    async def open(self) -> None:
        self._pool = await Oban.create_pool(self._url, min_size=1, max_size=POOL)
        self._oban = Oban(pool=self._pool)

    async def bulk(self, count: int, at: int | None) -> None:
        await self._oban.enqueue_many(_job(at) for _ in range(count))

    async def one(self, at: int | None) -> None:
        await self._oban.enqueue(_job(at))

    async def future(self, count: int) -> None:
        due = datetime.now(UTC) + timedelta(days=1)
        await self._oban.enqueue_many(_job(None, scheduled_at=due) for _ in range(count))

    async def close(self) -> None:
        await self._pool.close()

    async def work(self) -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        pool = await Oban.create_pool(self._url, min_size=1, max_size=POOL)
        async with Oban(pool=pool, queues={"default": LIMIT}):
            ready()
            await over.wait()
        await pool.close()


def _job(at: int | None, **options: Any) -> Any:
    kind: Any = Noop if at is None else Stamp
    return kind.new({} if at is None else {"at": at}, **options)


if __name__ == "__main__":
    run(ObanProgram, uvloop.new_event_loop)
