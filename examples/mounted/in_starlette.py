"""holdfast in a Starlette application, below `/queue`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import holdfast


async def hello(request: Request) -> JSONResponse:
    return JSONResponse("my own route")


def application() -> Starlette:
    queue = holdfast.asgi()  # The database as the settings say, or holdfast.asgi("postgresql:///jobs").

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with queue.running():
            yield

    return Starlette(routes=[Route("/hello", hello), Mount("/queue", queue)], lifespan=lifespan)
