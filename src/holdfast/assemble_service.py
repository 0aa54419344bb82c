"""Puts the service together: settings in; an ASGI application, and what runs beside it, out.

Apart from `assemble`, so that a worker does not import the web framework.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from holdfast import config, registry
from holdfast.api.app import Api, Background
from holdfast.api.dry_run import FactsOf
from holdfast.assemble import folder_artifacts, store_of, worker_of
from holdfast.config import Settings
from holdfast.duties.scheduler import DutyScheduler
from holdfast.errors import Invalid, StoreError
from holdfast.model import new_worker_id
from holdfast.pipeline.connectors import connector_of
from holdfast.pipeline.plan import PlanFacts
from holdfast.pipeline_spec import pipeline_of
from holdfast.runner.artifacts import MakeArtifacts
from holdfast.runner.base import CannotStart, EngineUnreachable
from holdfast.runner.function import FunctionRegistry
from holdfast.runner.shared_folder import open_shared_folder
from holdfast.store import Store
from holdfast.store.outage import retry_while_starting
from holdfast.worker.direct import DirectExecutor


def api_of(
    settings: Settings, *, background: Background | None = None, artifacts: MakeArtifacts = folder_artifacts
) -> Api:
    """Build the service on its own store. `background` runs beside it, with the same store."""
    registry.load_plugins()

    async def connect() -> Store:
        return await store_of(settings, connections=settings.api_connections, artifacts=artifacts)

    return Api(settings, connect, facts_of(settings), artifacts, background)


def facts_of(settings: Settings) -> FactsOf:
    """Return the function that finds the facts of a pipeline on this host: its image, or the installed server."""

    async def facts(spec: Mapping[str, Any]) -> PlanFacts:
        pipeline = pipeline_of(spec)
        if pipeline is None or "image" in spec:
            return PlanFacts(image=await image_of(settings, spec["image"]) if pipeline else None)
        try:
            return PlanFacts(engine=await asyncio.to_thread(connector_of(pipeline.connector).engine))
        except CannotStart as error:
            raise Invalid("connector", error.error.message) from None

    return facts


async def image_of(settings: Settings, name: str) -> str | None:
    """Return the digest of an image; None if this process's engine does not have it or is unreachable."""
    if settings.docker_host is None:
        return None
    try:  # Only here: what it needs is an extra.
        from holdfast.runner.docker.engine import Engine, EngineError  # noqa: PLC0415
    except ModuleNotFoundError:
        return None
    engine = Engine(settings.docker_host)
    try:
        return (await engine.image(name)).id
    except (EngineError, EngineUnreachable):
        return None
    finally:
        await engine.close()


def background_of(
    settings: Settings, functions: FunctionRegistry | None = None, *, artifacts: MakeArtifacts = folder_artifacts
) -> Background:
    """Return what runs beside a server: the duties and, where the queue is off, what runs the jobs."""
    if settings.queue_enabled:
        return duties_of(settings, artifacts=artifacts)
    return direct_of(settings, functions, artifacts=artifacts)


def direct_of(
    settings: Settings, functions: FunctionRegistry | None = None, *, artifacts: MakeArtifacts = folder_artifacts
) -> Background:
    """Return a worker that claims nothing, for a server that runs jobs in the request; it also runs the duties."""

    @asynccontextmanager
    async def running(store: Store) -> AsyncIterator[DirectExecutor]:
        async with worker_of(settings, queues={}, functions=functions, store=store, artifacts=artifacts) as worker:
            # Not a group: the block may be entered and left in different tasks.
            task = asyncio.create_task(worker.run())
            started = asyncio.create_task(worker.started.wait())
            await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
            try:
                if not task.done():
                    yield DirectExecutor(worker, store, settings)
            finally:
                if not task.done():
                    worker.drain()
                await task

    return running


def duties_of(settings: Settings, *, artifacts: MakeArtifacts = folder_artifacts) -> Background:
    """Return the duties, to run beside a server: one process of the installation leads them."""

    @asynccontextmanager
    async def running(store: Store) -> AsyncIterator[None]:
        installation = await retry_while_starting(store.installation)
        shared = await retry_while_starting(
            lambda: open_shared_folder(settings.shared, installation, store.shared_folder)
        )
        duties = DutyScheduler(store, new_worker_id(), settings, artifacts(settings, shared))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(duties.run())
            try:
                yield
            finally:
                task.cancel()
        with suppress(StoreError):
            await duties.resign()

    return running


def asgi(
    url: str | None = None,
    *,
    functions: FunctionRegistry | None = None,
    artifacts: MakeArtifacts = folder_artifacts,
    **settings: object,
) -> Api:
    """Build the service as an ASGI application, to serve or to mount: `app.mount("/jobs", holdfast.asgi())`.

    `url` is the database's; other settings are given by name, or come from the environment. `functions` are those of an
    application (`app.functions`), to be run in the request where the queue is off. `artifacts` makes another artifact
    store than the shared folder.
    """
    loaded = config.load({"database_url": url, **settings})
    return api_of(loaded, background=background_of(loaded, functions, artifacts=artifacts), artifacts=artifacts)
