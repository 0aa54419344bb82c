"""The application: routes, lifespan and docs, served by FastAPI. It can be mounted in another application."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from holdfast.api import VERSION, openapi
from holdfast.api.auth import Access, first_admin
from holdfast.api.connections import connection_limit
from holdfast.api.depths import DepthCounter
from holdfast.api.direct import DirectExecutor
from holdfast.api.dry_run import FactsOf
from holdfast.api.errors import unknown_route
from holdfast.api.fanout import Fanout
from holdfast.api.linger import Linger
from holdfast.api.readiness import Readiness
from holdfast.api.routes import (
    artifacts,
    audit,
    events,
    jobs,
    lanes,
    probes,
    queues,
    snapshots,
    tokens,
    tools,
    uploads,
    workers,
)
from holdfast.api.routes.docs import docs_routes
from holdfast.api.routing import Route, ServiceState, handler
from holdfast.api.stream import OpenStreams
from holdfast.api.tools import ToolRegistry, load_tools
from holdfast.config import Settings
from holdfast.errors import StoreError
from holdfast.runner.artifacts import MakeArtifacts
from holdfast.runner.disk import disks_of
from holdfast.runner.shared_folder import open_shared_folder
from holdfast.store import Store
from holdfast.store.audit import local_actor
from holdfast.store.outage import retry_while_starting

NOUNS = (jobs, events, artifacts, uploads, snapshots, lanes, queues, workers, tools, tokens, audit, probes)
Background = Callable[[Store], AbstractAsyncContextManager[DirectExecutor | None]]
"""What runs beside the service, with its store: the duties, or what runs jobs in the request."""


def declared() -> list[Route]:
    """Return every endpoint."""
    return [route for noun in NOUNS for route in noun.routes.all]


class Api(FastAPI):
    """The service as an ASGI application.

    Served alone, its lifespan starts and ends it. A mounted application has no lifespan: enter `running()` in that of
    your application; otherwise the service starts with the first request and ends with the process.
    """

    def __init__(
        self,
        settings: Settings,
        connect: Callable[[], Awaitable[Store]],
        facts: FactsOf,
        artifacts: MakeArtifacts,
        background: Background | None = None,
    ) -> None:
        # FastAPI's own pages load scripts from other hosts and bypass our guard: `routes/docs.py` has ours.
        super().__init__(
            title="holdfast", version=VERSION, lifespan=_lifespan, openapi_url=None, redirect_slashes=False
        )
        self.settings = settings
        self.made_admin = False
        self._connect = connect
        self._facts = facts
        self._artifacts = artifacts
        self._background = background
        self._service: ServiceState | None = None
        self._starting = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self.add_exception_handler(HTTPException, unknown_route)
        self.add_middleware(Linger)
        for route in (*declared(), *docs_routes(self.openapi).all):
            self.add_api_route(
                route.path,
                handler(route, self.service),
                methods=[route.method],
                name=route.run.__name__,
                response_model=None,
                include_in_schema=False,
            )

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = openapi.document(declared())
        return self.openapi_schema

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ServiceState]:
        """Run the service inside the block."""
        tools = load_tools(self.settings.tools, allow_root=self.settings.allow_root_jobs)
        async with contextlib.AsyncExitStack() as stack:
            store = await self._connect()
            stack.push_async_callback(store.close)
            stack.push_async_callback(self._keep_counts, store)
            if self.settings.auth == "on":
                self.made_admin = await first_admin(store.tokens, self.settings.admin_token)
            await retry_while_starting(lambda: self._record_tools(store, tools))
            fanout = Fanout(store)
            installation = await retry_while_starting(store.installation)
            shared = await retry_while_starting(
                lambda: open_shared_folder(self.settings.shared, installation, store.shared_folder)
            )
            depths = DepthCounter(store)
            streams = OpenStreams(self.settings.streams_per_token, connection_limit(self.settings) * 3 // 4)
            access = Access(store.tokens, store.audit, self.settings)
            readiness = Readiness(store, disks_of(self.settings, state=False))
            artifacts = self._artifacts(self.settings, shared)
            service = ServiceState(
                store, self.settings, shared, artifacts, access, fanout, streams, tools, self._facts, depths, readiness
            )
            await stack.enter_async_context(_task(fanout.run()))
            await stack.enter_async_context(_task(depths.run()))
            stack.callback(fanout.stop)
            stack.push_async_callback(access.note_rest)
            await stack.enter_async_context(_task(access.keep_noting()))
            if self._background is not None:
                service.direct = await stack.enter_async_context(self._background(store))
            self._service = service
            stack.callback(self._forget)
            yield service

    async def _record_tools(self, store: Store, tools: ToolRegistry) -> None:
        path = self.settings.tools
        subject = "none" if path is None else str(path.absolute())
        await store.audit.tools_loaded(local_actor("server"), subject, tools.digests())

    async def _keep_counts(self, store: Store) -> None:
        """Add this server's counters to the totals. In direct mode the embedded worker has reported them."""
        if self.settings.queue_enabled:
            with contextlib.suppress(StoreError):
                await store.workers.add_totals(store.counters.figures())

    def _forget(self) -> None:
        self._service = None

    def leave(self) -> None:
        """End the streams and hand over running jobs, so that a stopping server does not wait for them."""
        if self._service is not None:
            self._service.fanout.stop()
            if self._service.direct is not None:
                self._service.direct.leave()

    async def service(self) -> ServiceState:
        if self._service is None:
            async with self._starting:
                if self._service is None:
                    await self._stack.enter_async_context(self.running())
        assert self._service is not None
        return self._service


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    assert isinstance(app, Api)
    async with app.running() if app._service is None else nullcontext():
        yield


@asynccontextmanager
async def _task(work: Any) -> AsyncIterator[None]:
    """Run a task inside the block. Not a task group: the block may be entered and left in different tasks."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
