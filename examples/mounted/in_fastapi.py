"""holdfast in a FastAPI application, below `/queue`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import holdfast


def application() -> FastAPI:
    queue = holdfast.asgi()  # The database as the settings say, or holdfast.asgi("postgresql:///jobs").

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with queue.running():
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/hello")
    async def hello() -> str:
        return "my own route"

    app.mount("/queue", queue)
    return app
