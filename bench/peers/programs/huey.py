"""Huey on SQLite: a consumer with one thread, polled every 10 ms, results kept, SQLite's own fsync (FULL)."""

import datetime
import logging

from huey import SqliteHuey

from bench.peers.programs.serve import ready, run, stamp

POLL = 0.01


class HueyProgram:
    def __init__(self, path: str) -> None:
        self._huey = SqliteHuey(filename=path, store_none=True, timeout=60)

        @self._huey.task()
        def noop() -> int:
            return 1

        @self._huey.task()
        def stamped(at: int) -> None:
            stamp(at)

        self._noop, self._stamp = noop, stamped

    async def install(self) -> None:
        """The tables are made when it is opened."""

    async def open(self) -> None:
        pass

    async def bulk(self, count: int, at: int | None) -> None:
        """One by one: Huey has no call for several."""
        for _ in range(count):
            await self.one(at)

    async def one(self, at: int | None) -> None:
        if at is None:
            self._noop()
        else:
            self._stamp(at)

    async def future(self, count: int) -> None:
        for _ in range(count):
            self._noop.schedule(delay=datetime.timedelta(days=1))

    async def close(self) -> None:
        self._huey.storage.close()

    async def work(self) -> None:
        logging.getLogger("huey").setLevel(logging.ERROR)
        consumer = self._huey.create_consumer(
            workers=1, worker_type="thread", initial_delay=POLL, max_delay=POLL, backoff=1.0, periodic=False
        )
        ready()
        consumer.run()


if __name__ == "__main__":
    run(HueyProgram)
