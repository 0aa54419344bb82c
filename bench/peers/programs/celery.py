"""Celery on Redis: prefork with one child per worker, prefetch 128, results kept, no gossip, mingle or heartbeat."""

import os
import sys

from celery import Celery, group
from celery.signals import worker_ready

from bench.peers.programs.serve import ready, run, stamp

PREFETCH = 128
BROKER, RESULTS = "/0", "/1"

app = Celery("bench")


@app.task(name="noop")
def noop() -> int:
    return 1


@app.task(name="stamp")
def stamped(at: int) -> None:
    stamp(at)


@worker_ready.connect
def on_ready(**said: object) -> None:
    ready()


class CeleryProgram:
    def __init__(self, url: str) -> None:
        app.conf.update(
            broker_url=url + BROKER,
            result_backend=url + RESULTS,
            worker_prefetch_multiplier=PREFETCH,
            broker_connection_retry_on_startup=True,
            worker_hijack_root_logger=False,
            worker_redirect_stdouts=False,
        )

    async def install(self) -> None:
        """Nothing to prepare."""

    async def open(self) -> None:
        app.pool.acquire().release()

    async def bulk(self, count: int, at: int | None) -> None:
        """A group, which sends its tasks one by one over one connection."""
        with app.producer_pool.acquire(block=True) as producer:
            group(_task(at) for _ in range(count)).apply_async(producer=producer, add_to_parent=False)

    async def one(self, at: int | None) -> None:
        _task(at).apply_async()

    async def future(self, count: int) -> None:
        raise NotImplementedError("its workers hold tasks with a future ETA in their memory")

    async def close(self) -> None:
        app.close()

    async def work(self) -> None:
        options = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "ERROR"]
        app.worker_main(
            ["worker", "--pool", "prefork", "--concurrency", "1", "--hostname", f"w{os.getpid()}@%h", *options]
        )


def _task(at: int | None):  # type: ignore[no-untyped-def]
    return noop.s() if at is None else stamped.s(at)


if __name__ == "__main__":
    sys.modules["bench.peers.programs.celery"] = sys.modules["__main__"]
    run(CeleryProgram)
