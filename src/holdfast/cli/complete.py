"""Shell completion of names and ids that the server knows. On any error it offers nothing."""

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from holdfast.client.http import AsyncClient

SECONDS = 2.0
MOST = 50
Offer = list[tuple[str, str]]
"""Return the candidates, each with a description that zsh and fish show."""


def jobs(context: typer.Context, incomplete: str) -> Offer:
    async def read(client: "AsyncClient") -> Offer:
        found, _ = await client.jobs(id=incomplete or None, limit=MOST)
        return [(job.id, f"{job.status} {job.kind}") for job in found]

    return _offer(context, incomplete, read)


def statuses(context: typer.Context, incomplete: str) -> Offer:
    from holdfast.model import Status

    return _beginning(incomplete, ((str(status), "") for status in Status))


def lanes(context: typer.Context, incomplete: str) -> Offer:
    async def read(client: "AsyncClient") -> Offer:
        return [(lane.lane, str(lane.state)) for lane in await client.lanes()]

    return _offer(context, incomplete, read)


def queues(context: typer.Context, incomplete: str) -> Offer:
    async def read(client: "AsyncClient") -> Offer:
        return [(queue.queue, "paused" if queue.paused else "") for queue in await client.queues()]

    return _offer(context, incomplete, read)


def hosts(context: typer.Context, incomplete: str) -> Offer:
    async def read(client: "AsyncClient") -> Offer:
        return sorted({(worker.host, "") for worker in await client.workers()})

    return _offer(context, incomplete, read)


def tools(context: typer.Context, incomplete: str) -> Offer:
    async def read(client: "AsyncClient") -> Offer:
        return [(tool.name, tool.description) for tool in await client.tools()]

    return _offer(context, incomplete, read)


def _offer(context: typer.Context, incomplete: str, read: "Callable[[AsyncClient], Awaitable[Offer]]") -> Offer:
    """Ask the server that the command line names so far; print no error, as it would disturb the line being typed."""
    import asyncio

    from holdfast.client.http import AsyncClient

    options = context.find_root().params

    async def whole() -> Offer:
        async with asyncio.timeout(SECONDS):
            async with AsyncClient(
                options.get("url"), token=options.get("token"), tenant=options.get("tenant"), tries=1
            ) as client:
                return await read(client)

    try:
        return _beginning(incomplete, asyncio.run(whole()))
    except Exception:
        return []


def _beginning(incomplete: str, found: Iterable[tuple[str, str]]) -> Offer:
    return [(name, about) for name, about in found if name.startswith(incomplete)]
