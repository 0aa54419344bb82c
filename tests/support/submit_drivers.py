"""Callers with a transaction of their own, one per driver and kind of connection that `submit_inside` takes."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import submit_inside, submit_inside_async
from holdfast.store import Store
from holdfast.store.postgres import PostgresDatabase
from holdfast.submission import Accepted
from tests.support.store_harness import StoreHarness

DOCS = Path(__file__).parents[2] / "docs" / "transactions.md"
JOB: dict[str, Any] = {"runner": "function", "spec": {"name": "f"}}
ONE_EACH = ["asyncpg", "psycopg", "async session over asyncpg", "sqlite3"]
GUARD = 60.0
"""Seconds after which something that should not wait is stuck; nothing is measured with it."""
TABLES = ("jobs", "specs", "needs", "reuse", "idempotency")
Step = Callable[..., Awaitable[Any]]


class SubmitDriver:
    """A connection, and the caller's own steps on it; those that block run in a thread."""

    def __init__(self, connection: Any, submit: Step, execute: Step, commit: Step, rollback: Step) -> None:
        self.connection = connection
        self._submit = submit
        self.execute = execute
        self.commit = commit
        self.rollback = rollback

    async def submit(self, *jobs: Any, **options: Any) -> list[Accepted]:
        answer: list[Accepted] = await self._submit(self.connection, jobs, **options)
        return answer

    async def note(self, text: str) -> None:
        """Work of the caller's own in the same transaction."""
        await self.execute(f"INSERT INTO notes (note) VALUES ('{text}')")


Opened = tuple[Any, Callable[[str], Any], Any, Callable[[], Any]]
"""A connection, how it executes, who commits and rolls back, how it is closed; for those that block."""


def _psycopg(url: str) -> Opened:
    connection = psycopg.connect(url, row_factory=dict_row)
    return connection, connection.execute, connection, connection.close


def _psycopg_raw_cursor(url: str) -> Opened:
    connection = psycopg.connect(url, cursor_factory=psycopg.RawCursor)
    return connection.cursor(), connection.execute, connection, connection.close


def _core(url: str) -> Opened:
    engine = create_engine(url)
    connection = engine.connect()

    def close() -> None:
        connection.close()
        engine.dispose()

    return connection, connection.exec_driver_sql, connection, close


def _session(url: str) -> Opened:
    engine = create_engine(url)
    session = Session(engine)

    def close() -> None:
        session.close()
        engine.dispose()

    return session, lambda sql: session.execute(text(sql)), session, close


def _sqlite3(url: str) -> Opened:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)
    return connection, connection.execute, connection, connection.close


@asynccontextmanager
async def blocking(opener: Callable[[str], Opened], url: str) -> AsyncIterator[SubmitDriver]:
    """A caller whose every step runs in one thread of its own."""
    with ThreadPoolExecutor(1) as thread:

        def step(work: Callable[..., Any]) -> Step:
            async def run(*arguments: Any, **options: Any) -> Any:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(thread, lambda: work(*arguments, **options))

            return run

        connection, execute, ends, close = await step(opener)(url)
        try:
            yield SubmitDriver(connection, step(submit_inside), step(execute), step(ends.commit), step(ends.rollback))
        finally:
            await step(close)()


@asynccontextmanager
async def _asyncpg(url: str) -> AsyncIterator[SubmitDriver]:
    connection = await asyncpg.connect(url)
    try:
        yield _asyncpg_caller(connection)
    finally:
        await connection.close()


@asynccontextmanager
async def _asyncpg_pool(url: str) -> AsyncIterator[SubmitDriver]:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        yield _asyncpg_caller(connection)


def _asyncpg_caller(connection: Any) -> SubmitDriver:
    """Begins with the first step, as the other drivers do."""

    def begun(step: Step) -> Step:
        async def run(*arguments: Any, **options: Any) -> Any:
            if not connection.is_in_transaction():
                await connection.execute("BEGIN")
            return await step(*arguments, **options)

        return run

    return SubmitDriver(
        connection,
        begun(submit_inside_async),
        begun(connection.execute),
        lambda: connection.execute("COMMIT"),
        lambda: connection.execute("ROLLBACK"),
    )


@asynccontextmanager
async def _psycopg_async(url: str) -> AsyncIterator[SubmitDriver]:
    async with await psycopg.AsyncConnection.connect(url, row_factory=dict_row) as connection:
        yield SubmitDriver(connection, submit_inside_async, connection.execute, connection.commit, connection.rollback)


@asynccontextmanager
async def _psycopg_async_cursor(url: str) -> AsyncIterator[SubmitDriver]:
    async with await psycopg.AsyncConnection.connect(url) as connection, connection.cursor() as cursor:
        yield SubmitDriver(cursor, submit_inside_async, connection.execute, connection.commit, connection.rollback)


@asynccontextmanager
async def _core_async(url: str) -> AsyncIterator[SubmitDriver]:
    async with AsyncExitStack() as stack:
        engine = create_async_engine(url)
        stack.push_async_callback(engine.dispose)
        connection = await stack.enter_async_context(engine.connect())
        yield SubmitDriver(
            connection, submit_inside_async, connection.exec_driver_sql, connection.commit, connection.rollback
        )


@asynccontextmanager
async def _session_async(url: str) -> AsyncIterator[SubmitDriver]:
    async with AsyncExitStack() as stack:
        engine = create_async_engine(url)
        stack.push_async_callback(engine.dispose)
        session = await stack.enter_async_context(AsyncSession(engine))

        async def execute(sql: str) -> None:
            await session.execute(text(sql))

        yield SubmitDriver(session, submit_inside_async, execute, session.commit, session.rollback)


def open_caller(driver: str, url: str) -> Any:
    """A caller by the name of its driver, as an asynchronous context."""
    way, _, dialect = driver.partition(" over ")
    if dialect:
        scheme, _, rest = url.partition("://")
        url = f"{scheme}+{dialect}://{rest}"
    known = {"asyncpg": _asyncpg, "asyncpg pool": _asyncpg_pool, "psycopg async": _psycopg_async}
    known["psycopg async cursor"] = _psycopg_async_cursor
    known |= {"async connection": _core_async, "async session": _session_async}
    if way in known:
        return known[way](url)
    openers = {"psycopg": _psycopg, "psycopg cursor": _psycopg_raw_cursor, "sqlite3": _sqlite3}
    openers |= {"connection": _core, "session": _session}
    return blocking(openers[way], url)


POSTGRES = [
    "asyncpg",
    "asyncpg pool",
    "psycopg",
    "psycopg cursor",
    "psycopg async",
    "psycopg async cursor",
    "connection over psycopg",
    "session over psycopg",
    "async connection over psycopg",
    "async session over psycopg",
    "async connection over asyncpg",
    "async session over asyncpg",
]
SQLITE = [
    "sqlite3",
    "connection over pysqlite",
    "session over pysqlite",
    "async connection over aiosqlite",
    "async session over aiosqlite",
]


async def run_sql(store: Store, sql: str) -> list[Any]:
    """Run SQL on a connection that is not the caller's."""
    if isinstance(store.database, PostgresDatabase):
        return [next(iter(row.values())) for row in await store.database.fetch(sql)]
    file = sqlite3.connect(store.database.path, isolation_level=None)
    try:
        return [row[0] for row in file.execute(sql.replace("holdfast.", "")).fetchall()]
    finally:
        file.close()


async def rows_left(harness: StoreHarness) -> dict[str, int]:
    """Return how many rows a submit left, by table; only tables with rows."""
    counts = {table: (await run_sql(harness.store, f"SELECT count(*) FROM holdfast.{table}"))[0] for table in TABLES}
    return {table: count for table, count in counts.items() if count}


async def notes(harness: StoreHarness) -> list[str]:
    return await run_sql(harness.store, "SELECT note FROM notes ORDER BY note")


async def until_one_waits_for_a_lock(harness: StoreHarness) -> None:
    sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with asyncio.timeout(GUARD):
        while (await run_sql(harness.store, sql))[0] == 0:
            pass
