"""awa: its Rust core through its Python package, COPY for bulk submits, 200 jobs at once."""

import asyncio
import signal
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from awa import AsyncClient

from bench.peers.programs.serve import ready, run, stamp

WORKERS = 200


@dataclass
class Noop:
    pass


@dataclass
class Stamp:
    at: int


class AwaProgram:
    def __init__(self, url: str) -> None:
        self._url = url

    async def install(self) -> None:
        client = AsyncClient(self._url)
        await client.migrate()
        await client.close()
        await self._activate()

    async def _activate(self) -> None:
        """Let a worker start and stop: the first one activates the storage that COPY writes to."""
        client = AsyncClient(self._url)

        @client.task(Noop, queue="default")
        async def noop(job: Any) -> None:
            pass

        await client.start([("default", 1)])
        await client.shutdown()
        await client.close()

    async def open(self) -> None:
        self._client = AsyncClient(self._url)

    async def bulk(self, count: int, at: int | None) -> None:
        await self._client.enqueue_many_copy([_job(at) for _ in range(count)])

    async def one(self, at: int | None) -> None:
        await self._client.insert(_job(at))

    async def future(self, count: int) -> None:
        due = datetime.now(UTC) + timedelta(days=1)
        await self._client.enqueue_many_copy([Noop() for _ in range(count)], run_at=due)

    async def close(self) -> None:
        await self._client.close()

    async def work(self) -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        client = AsyncClient(self._url)

        @client.task(Noop, queue="default")
        async def noop(job: Any) -> None:
            pass

        @client.task(Stamp, queue="default")
        async def stamped(job: Any) -> None:
            stamp(job.args.at)

        await client.start([("default", WORKERS)])
        ready()
        await over.wait()
        await client.shutdown()


def _job(at: int | None) -> Noop | Stamp:
    return Noop() if at is None else Stamp(at)


if __name__ == "__main__":
    run(AwaProgram)
