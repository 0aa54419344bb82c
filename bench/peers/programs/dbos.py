"""DBOS: workflows on a queue that is polled every 10 ms, enqueued in bulk inside one transaction per 1,000."""

import asyncio
import os
import signal

import sqlalchemy
from dbos import DBOS, DBOSClient, DBOSConfig

from bench.peers.programs.serve import ready, run, stamp

QUEUE = "default"
VERSION = "bench"
POLL = 0.01
CONCURRENCY = 200
CHUNK = 1000
DAY = 86_400.0


class DbosProgram:
    def __init__(self, url: str) -> None:
        self._url = url

    def _launch(self) -> None:
        config: DBOSConfig = {
            "name": "bench",
            "system_database_url": self._url,
            "application_version": VERSION,
            "executor_id": f"worker-{os.getpid()}",
            "log_level": "ERROR",
        }
        DBOS(config=config)

        @DBOS.workflow(name="noop")
        def noop() -> int:
            return 1

        @DBOS.workflow(name="stamp")
        def stamped(at: int) -> None:
            stamp(at)

        DBOS.launch()
        DBOS.register_queue(QUEUE, worker_concurrency=CONCURRENCY, polling_interval_sec=POLL)

    async def install(self) -> None:
        await asyncio.to_thread(self._launch)
        await asyncio.to_thread(DBOS.destroy)

    async def open(self) -> None:
        self._client = DBOSClient(system_database_url=self._url)
        self._engine = sqlalchemy.create_engine(self._url.replace("postgresql://", "postgresql+psycopg://"))

    async def bulk(self, count: int, at: int | None) -> None:
        for n in range(0, count, CHUNK):
            with self._engine.begin() as connection:
                for _ in range(min(CHUNK, count - n)):
                    self._client.enqueue_in_transaction(connection, _options(at), *_arguments(at))

    async def one(self, at: int | None) -> None:
        self._client.enqueue(_options(at), *_arguments(at))

    async def future(self, count: int) -> None:
        for _ in range(count):
            self._client.enqueue({**_options(None), "delay_seconds": DAY})

    async def close(self) -> None:
        self._client.destroy()

    async def work(self) -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        await asyncio.to_thread(self._launch)
        ready()
        await over.wait()
        await asyncio.to_thread(DBOS.destroy)


def _options(at: int | None):  # type: ignore[no-untyped-def]
    return {"workflow_name": "noop" if at is None else "stamp", "queue_name": QUEUE, "app_version": VERSION}


def _arguments(at: int | None) -> tuple[int, ...]:
    return () if at is None else (at,)


if __name__ == "__main__":
    run(DbosProgram)
