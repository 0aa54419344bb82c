"""Plain SQL over asyncpg, as a yardstick: the plainest table, claims of 100, a NOTIFY with each submit.

The plainest queue that still finds its jobs after a crash: no attempts, no events, no leases, no results.
"""

import asyncio
import signal

import asyncpg
import uvloop

from bench.peers.programs.serve import ready, run, stamp

BATCH = 100
CLAIM = (
    "WITH picked AS MATERIALIZED ("
    "  SELECT id FROM raw_jobs WHERE status = 'queued' ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)"
    "UPDATE raw_jobs SET status = 'running' FROM picked WHERE raw_jobs.id = picked.id RETURNING raw_jobs.id, at"
)


class RawProgram:
    def __init__(self, url: str) -> None:
        self._url = url

    async def install(self) -> None:
        await self.open()
        await self._connection.execute(
            "CREATE TABLE raw_jobs (id bigserial PRIMARY KEY, status text NOT NULL, at bigint)"
        )
        await self._connection.execute("CREATE INDEX ON raw_jobs (id) WHERE status = 'queued'")
        await self.close()

    async def open(self) -> None:
        self._connection = await asyncpg.connect(self._url)

    async def bulk(self, count: int, at: int | None) -> None:
        await self._connection.execute(
            "WITH added AS (INSERT INTO raw_jobs (status, at) SELECT 'queued', unnest($1::bigint[]))"
            "SELECT pg_notify('raw', '')",
            [at] * count,
        )

    async def one(self, at: int | None) -> None:
        await self._connection.execute(
            "WITH added AS (INSERT INTO raw_jobs (status, at) VALUES ('queued', $1)) SELECT pg_notify('raw', '')", at
        )

    async def future(self, count: int) -> None:
        raise NotImplementedError("has no future jobs")

    async def close(self) -> None:
        await self._connection.close()

    async def work(self) -> None:
        await self.open()
        woken, over = asyncio.Event(), asyncio.Event()

        def stop() -> None:
            over.set()
            woken.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        await self._connection.add_listener("raw", lambda *_: woken.set())
        ready()
        while not over.is_set():
            woken.clear()
            while await self._claim_and_finish():
                pass
            await woken.wait()
        await self.close()

    async def _claim_and_finish(self) -> bool:
        rows = await self._connection.fetch(CLAIM, BATCH)
        for row in rows:
            if row["at"] is not None:
                stamp(row["at"])
        if rows:
            ids = [row["id"] for row in rows]
            await self._connection.execute("UPDATE raw_jobs SET status = 'done' WHERE id = ANY($1)", ids)
        return bool(rows)


if __name__ == "__main__":
    run(RawProgram, uvloop.new_event_loop)
