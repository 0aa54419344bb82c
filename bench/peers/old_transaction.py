"""A transaction that stays open and keeps every dead row from being removed."""

import contextlib
from collections.abc import AsyncIterator

import asyncpg

OLD_TRANSACTION = "old transaction"


@contextlib.asynccontextmanager
async def old_transaction(url: str) -> AsyncIterator[None]:
    connection = await asyncpg.connect(url, server_settings={"application_name": OLD_TRANSACTION})
    try:
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await connection.execute("SELECT count(*) FROM pg_class")
        yield
        await connection.execute("ROLLBACK")
    finally:
        await connection.close()
