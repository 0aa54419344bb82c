"""The four ways in to the Python API: on the database and over HTTP, asynchronous and synchronous."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast import AsyncClient, Client, Holdfast
from tests.support.service import service_in_process

WAYS = ["database async", "database sync", "http async", "http sync"]


class Way:
    """One way in. `await way(lambda: job.cancel())` makes a call, whichever colour it has."""

    def __init__(self, name: str, api: Any, app: Holdfast) -> None:
        self.name = name
        self.api = api
        self.app = app

    async def __call__(self, call: Callable[[], Any]) -> Any:
        if self.name.endswith("async"):
            found = call()
            if inspect.isasyncgen(found):
                return [item async for item in found]
            return await found
        return await asyncio.to_thread(_called, call)

    async def submit(self, *arguments: Any, **named: Any) -> Any:
        return await self(lambda: self.api.submit(*arguments, **named))

    async def submit_many(self, *arguments: Any, **named: Any) -> Any:
        return await self(lambda: self.api.submit_many(*arguments, **named))


def _called(call: Callable[[], Any]) -> Any:
    found = call()
    return list(found) if inspect.isgenerator(found) else found


@asynccontextmanager
async def way_in(name: str, app: Holdfast, url: str, folder: Path) -> AsyncIterator[Way]:
    """Open one of the ways in to a store, for an application that is not open yet."""
    app.settings = replace(
        app.settings,
        database_url=url,
        data_dir=folder,
        docker_host=None,
        process_user="root",
        poll_interval=0.2,
        drain_grace=2.0,
    )
    async with AsyncExitStack() as stack:
        if name == "database async":
            yield Way(name, await stack.enter_async_context(app), app)
            return
        if name == "database sync":
            sync = await asyncio.to_thread(app.sync)
            stack.push_async_callback(asyncio.to_thread, sync.close)
            yield Way(name, sync, app)
            return
        service = await stack.enter_async_context(service_in_process(url, folder / "data"))
        if name == "http async":
            client = AsyncClient(service.url, token=service.admin)
            yield Way(name, await stack.enter_async_context(client), app)
            return
        blocking = await asyncio.to_thread(Client, service.url, token=service.admin)
        stack.push_async_callback(asyncio.to_thread, blocking.close)
        yield Way(name, blocking, app)
