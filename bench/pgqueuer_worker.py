"""Run by PgQueuer's own Python: install its tables, fill its queue, or empty it with one worker."""

import asyncio
import sys

import asyncpg  # type: ignore[import-not-found,unused-ignore]
import uvloop
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode

from pgqueuer import PgQueuer


async def main(url: str, verb: str, number: str = "0") -> None:
    connection = await asyncpg.connect(url)
    driver = AsyncpgDriver(connection)
    match verb:
        case "install":
            await Queries(driver).install()
        case "fill":
            for _ in range(0, int(number), 10_000):
                count = min(10_000, int(number))
                await Queries(driver).enqueue(["noop"] * count, [None] * count, [0] * count)
            await connection.execute("TRUNCATE pgqueuer_log")
        case "drain":
            await drain(driver, int(number))
    await connection.close()


async def drain(driver: AsyncpgDriver, batch: int) -> None:
    queue = PgQueuer(driver)

    @queue.entrypoint("noop")  # type: ignore[untyped-decorator]
    async def noop(job: Job) -> None:
        pass

    await queue.run(batch_size=batch, mode=QueueExecutionMode.drain)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
