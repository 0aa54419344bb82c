"""holdfast: the public application object for single submits, the store's bulk call, and `holdfast worker` itself."""

from datetime import UTC, datetime, timedelta
from typing import Any

from bench.peers.programs.serve import run, stamp
from holdfast.client.app import Holdfast
from holdfast.store.migrate import migrate
from holdfast.store.store import connect

BULK = 10_000
app = Holdfast()


@app.function()
async def noop() -> int:
    """Do nothing, and have a result to keep."""
    return 1


@app.function(name="stamp")
async def stamped(at: int) -> None:
    stamp(at)


class HoldfastProgram:
    def __init__(self, url: str) -> None:
        self._url = url
        self._app = Holdfast(url)
        self._app.functions = app.functions

    async def install(self) -> None:
        database = await connect(self._url, connections=1, listen=False)
        await migrate(database)
        await database.close()

    async def open(self) -> None:
        await self._app.__aenter__()

    async def bulk(self, count: int, at: int | None) -> None:
        for n in range(0, count, BULK):
            await self._app.store.jobs.submit_many([_job(at)] * min(BULK, count - n))

    async def one(self, at: int | None) -> None:
        await (self._app.submit(noop) if at is None else self._app.submit(stamped, at=at))

    async def future(self, count: int) -> None:
        due = datetime.now(UTC) + timedelta(days=1)
        await self._app.store.jobs.submit_many([{**_job(None), "available_at": due}] * count)

    async def close(self) -> None:
        await self._app.__aexit__(None, None, None)

    async def work(self) -> None:
        raise NotImplementedError("its workers are `holdfast worker`")


def _job(at: int | None) -> dict[str, Any]:
    if at is None:
        return {"runner": "function", "spec": {"name": "noop"}}
    return {"runner": "function", "spec": {"name": "stamp"}, "inputs": {"at": at}}


if __name__ == "__main__":
    run(HoldfastProgram)
