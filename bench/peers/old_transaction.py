"""A transaction that stays open and keeps every dead row from being removed."""

import contextlib
from collections.abc import AsyncIterator

import asyncpg


@contextlib.asynccontextmanager
async def old_transaction(url: str) -> AsyncIterator[None]:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await connection.execute("SELECT count(*) FROM pg_class")
        yield
        await connection.execute("ROLLBACK")
    finally:
        await connection.close()
