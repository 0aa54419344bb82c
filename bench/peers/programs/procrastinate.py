"""Procrastinate: psycopg, LISTEN/NOTIFY on, 100 jobs at once, batched defers."""

import asyncio
from datetime import UTC, datetime, timedelta

from procrastinate import App, PsycopgConnector

from bench.peers.programs.serve import ready, run, stamp

CONCURRENCY = 100
POOL = 10


class ProcrastinateProgram:
    def __init__(self, url: str) -> None:
        self._app = App(connector=PsycopgConnector(conninfo=url, min_size=1, max_size=POOL))

        @self._app.task(name="noop")
        async def noop() -> None:
            pass

        @self._app.task(name="stamp")
        async def stamped(at: int) -> None:
            stamp(at)

        self._noop, self._stamp = noop, stamped

    async def install(self) -> None:
        async with self._app.open_async():
            await self._app.schema_manager.apply_schema_async()

    async def open(self) -> None:
        await self._app.open_async()

    async def bulk(self, count: int, at: int | None) -> None:
        if at is None:
            await self._noop.batch_defer_async(*({} for _ in range(count)))
        else:
            await self._stamp.batch_defer_async(*({"at": at} for _ in range(count)))

    async def one(self, at: int | None) -> None:
        await (self._noop.defer_async() if at is None else self._stamp.defer_async(at=at))

    async def future(self, count: int) -> None:
        due = datetime.now(UTC) + timedelta(days=1)
        await self._noop.configure(schedule_at=due).batch_defer_async(*({} for _ in range(count)))

    async def close(self) -> None:
        await self._app.close_async()

    async def work(self) -> None:
        async with self._app.open_async():
            asyncio.get_running_loop().call_later(0.5, ready)
            await self._app.run_worker_async(concurrency=CONCURRENCY, listen_notify=True)


if __name__ == "__main__":
    run(ProcrastinateProgram)
