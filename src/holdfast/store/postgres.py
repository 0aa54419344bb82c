"""Postgres through asyncpg: a pool for statements, and a separate connection for LISTEN.

READ COMMITTED, one statement per round trip, no session state, so that any connection will do. A pooler in transaction
mode keeps no session settings: with one, every operation is a transaction that starts by setting them.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import asyncpg
import msgspec

from holdfast import decoding
from holdfast.config import Pooler
from holdfast.errors import HoldfastError, Invalid, LockTimeout, StoreError, StoreFull, StoreUnreachable
from holdfast.store import queries
from holdfast.store.database import Counters, Row, Tx, json_text
from holdfast.store.error_mapping import error_from_sqlstate, permission_denied
from holdfast.store.outage import QUIET, DatabaseOutage, outage_of
from holdfast.store.postgres_parameters import Prepared, prepare, submit_parameters
from holdfast.submission import Batch

T = TypeVar("T")

RETRIES = 10
CONNECT_SECONDS = 10.0
LISTEN_AGAIN = 1.0
LATE_SECONDS = 0.1
"""A timer that fires this late means that our own event loop was blocked, not that the database is slow."""
# One plan per statement, made once, with index scans and nested loops whatever the statistics say: every statement is
# written for its index, a queue's statistics are always stale (a plan made on an empty table sorted the whole backlog:
# 19 ms instead of 4), and JIT or repeated planning costs too much (0.8 of the claim's 4 ms).
PLANNER = {
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
# Our transactions wait for nothing but Postgres. If a process is stopped or disconnected inside one, its locks would
# last as long as the connection looks alive, and all others would wait for a lane that it had locked.
PATIENCE = {"idle_in_transaction_session_timeout": "10000"}
NAME = {"application_name": "holdfast"}
SESSION = {**NAME, **PLANNER, **PATIENCE}
BEGIN = "; ".join(["BEGIN", *(f"SET LOCAL {name} = {value}" for name, value in {**PLANNER, **PATIENCE}.items())])
DATA_ERRORS = ("22", "54")
"""SQLSTATE classes of a value that cannot be stored, or of a limit. The database is fine; a retry would fail again."""
STATEMENTS = 100  # asyncpg's own default for the prepared statements that a connection keeps.
POOLER_NOT_SET = (
    "there is a pooler between holdfast and Postgres: set HOLDFAST_POOLER=transaction"
    ' (in code, `pooler="transaction"`), or use a URL that leads to Postgres itself'
)
_RETRIED = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
_AWAY = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # asyncpg's protocol state is broken after the server cut the connection in a call.
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    OSError,
    TimeoutError,
)


class PostgresTx:
    def __init__(self, connection: Any, named: dict[str, Prepared]) -> None:
        self._connection = connection
        self._named = named

    async def rows(self, name: str, /, **parameters: Any) -> Sequence[Row]:
        statement = self._named[name]
        found: Sequence[Row] = await self._connection.fetch(statement.text, *statement.arguments(parameters))
        return found

    async def values(self, name: str, kind: type[T], /, **parameters: Any) -> Sequence[T]:
        return self._named[name].structs(kind, await self.rows(name, **parameters))

    async def submit(self, batch: Batch) -> Sequence[Row]:
        return await self.rows("submit", **submit_parameters(batch))


class _Limit:
    """Closes a connection that does not answer in time; if our own event loop was blocked, the time starts again."""

    def __init__(self, connection: Any, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self.cut = False
        self._arm()

    def _arm(self) -> None:
        self._due = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(self._due, self._over)

    def _over(self) -> None:
        if self._loop.time() > self._due + LATE_SECONDS:
            self._arm()
            return
        self.cut = True
        self._connection.terminate()

    def end(self) -> None:
        self._timer.cancel()


class PostgresDatabase:
    """The Postgres dialect."""

    def __init__(
        self,
        schema: str,
        pool: "asyncpg.Pool[asyncpg.Record]",
        *,
        pooled: bool,
        listen: bool,
        listen_url: str | None,
        answer_within: float | None = None,
        role: str | None = None,
        outage: DatabaseOutage | None = None,
    ) -> None:
        self.counters = Counters()
        self.transaction_waits = True
        self._outage = outage or DatabaseOutage("of Postgres")
        self.schema = schema
        self._pool = pool
        self._pooled = pooled
        self._listen = listen
        self._listen_url = listen_url
        self._answer_within = answer_within
        self._role = role or "the one that HOLDFAST_DATABASE_URL names"
        self._named = prepare(schema)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        schema: str = queries.DEFAULT_SCHEMA,
        connections: int = 4,
        listen: bool = True,
        listen_url: str | None = None,
        pooler: Pooler = "none",
        answer_within: float | None = None,
    ) -> "PostgresDatabase":
        """Open the pool. With a pooler, LISTEN needs `listen_url`, which leads to Postgres itself; without it we poll.

        A connection that does not answer an operation within `answer_within` seconds is closed: it may be half open.
        The same limit holds for connecting, because the pool lets all others wait while it opens its last connection.
        """
        pooled = pooler == "transaction"
        outage = outage_of(url)
        logging.getLogger("asyncpg.pool").addFilter(QUIET)
        try:
            pool = await asyncpg.create_pool(
                url,
                min_size=1,
                max_size=connections,
                init=_or_cut(_set_up if pooled else _set_up_session),
                reset=_leave,
                timeout=min(CONNECT_SECONDS, answer_within or CONNECT_SECONDS),
                server_settings=NAME if pooled else SESSION,
                statement_cache_size=0 if pooled else STATEMENTS,
            )
        except (*_AWAY, asyncpg.PostgresError, ValueError) as error:
            if _from_pooler(error):
                raise StoreError(f"{POOLER_NOT_SET} ({error})") from error
            unreachable = StoreUnreachable(f"cannot reach Postgres: {str(error) or 'no answer in time'}")
            unreachable.reported = outage.away
            raise unreachable from error
        return cls(
            schema,
            pool,
            pooled=pooled,
            listen=listen,
            listen_url=listen_url or (None if pooled else url),
            answer_within=answer_within,
            role=urlsplit(url).username,
            outage=outage,
        )

    async def read(self, name: str, /, **parameters: Any) -> Sequence[Row]:
        return await self.rows(name, **parameters)

    async def read_long(self, name: str, /, **parameters: Any) -> Sequence[Row]:
        return await self.rows(name, **parameters)

    async def rows(self, name: str, /, *, urgent: bool = False, **parameters: Any) -> Sequence[Row]:
        statement = self._named[name]
        arguments = statement.arguments(parameters)
        return await self._run(lambda connection: connection.fetch(statement.text, *arguments))

    async def values(self, name: str, kind: type[T], /, **parameters: Any) -> Sequence[T]:
        return self._named[name].structs(kind, await self.rows(name, **parameters))

    async def submit(self, batch: Batch) -> Sequence[Row]:
        return await self.rows("submit", **submit_parameters(batch))

    async def submit_one(self, batch: Batch, *, topics: Sequence[str] | None = None) -> Row:
        sent = json_text(list(topics)) if topics is not None and self._listen else None
        (row,) = await self.rows("submit_one", **submit_parameters(batch), topics=sent)
        return row

    async def transact(self, work: Callable[[Tx], Awaitable[T]]) -> T:
        return await self.with_transaction(lambda connection: work(PostgresTx(connection, self._named)))

    async def _run(self, work: Callable[[Any], Awaitable[T]], *, whole: bool = False) -> T:
        """Run on a pooled connection, retry after a deadlock, and translate errors into holdfast's own."""
        for n in range(RETRIES):
            began = time.monotonic()
            try:
                async with self._connection() as connection, self._scope(connection, whole=whole):
                    try:
                        answer = await work(connection)
                        self._outage.back(began)
                        return answer
                    except asyncpg.InternalClientError:
                        connection.terminate()
                        raise
            except _RETRIED as error:
                self.counters.deadlocks += 1
                if n == RETRIES - 1:
                    raise StoreError(f"gave up after {RETRIES} deadlocks: {error}") from error
                await asyncio.sleep(0.01 * 2**n)
            except HoldfastError:
                raise
            except (*_AWAY, asyncpg.PostgresError) as error:
                mapped = _mapped(error, self.schema, self._role)
                if isinstance(mapped, StoreUnreachable):
                    self._outage.lost(mapped)
                self.counters.errors += isinstance(mapped, StoreError)
                raise mapped from error
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        """Lend a connection of the pool; close it when an answer takes too long: nothing else ends a half-open one."""
        if self._answer_within is None:
            async with self._pool.acquire() as connection:
                yield connection
            return
        async with self._pool.acquire(timeout=self._answer_within) as connection:
            limit = _Limit(connection, self._answer_within)
            try:
                yield connection
            except Exception as error:
                if limit.cut:  # asyncpg's own operation then fails with any error.
                    raise TimeoutError(f"no answer within {self._answer_within:g} seconds") from error
                raise
            finally:
                limit.end()

    def _scope(self, connection: Any, *, whole: bool) -> AbstractAsyncContextManager[object]:
        """Return a transaction where one is needed: for several statements, and always with a pooler."""
        if self._pooled:
            return _transaction(connection)
        return connection.transaction() if whole else nullcontext()

    async def announce(self, topics: Sequence[str]) -> None:
        if self._listen:
            await self._run(lambda c: c.execute("SELECT pg_notify($1, $2)", self.schema, json_text(list(topics))))

    @asynccontextmanager
    async def hear(self) -> AsyncIterator[AsyncIterator[Sequence[str]]]:
        yield self._announcements(self._listen_url) if self._listen and self._listen_url else _silence()

    async def _announcements(self, url: str) -> AsyncIterator[Sequence[str]]:
        """Yield notifications of other processes; after a lost connection, everything may have changed."""
        while True:
            try:
                connection = await asyncpg.connect(url, timeout=CONNECT_SECONDS)
            except (*_AWAY, asyncpg.PostgresError):
                await asyncio.sleep(LISTEN_AGAIN)
                continue
            heard: asyncio.Queue[Sequence[str] | None] = asyncio.Queue()
            try:
                await self._listen_on(connection, heard)
                yield ("*",)
                while (topics := await heard.get()) is not None:
                    yield topics
            except (*_AWAY, asyncpg.PostgresError):
                await asyncio.sleep(LISTEN_AGAIN)
            finally:
                connection.terminate()
            yield ("*",)

    async def _listen_on(self, connection: Any, heard: "asyncio.Queue[Sequence[str] | None]") -> None:
        connection.add_termination_listener(lambda _: heard.put_nowait(None))
        await connection.add_listener(self.schema, lambda *args: heard.put_nowait(_topics(args[3])))

    async def fetch(self, sql: str, *arguments: Any) -> Sequence[Row]:
        """Run SQL that is not a named statement; for the migrator."""
        return await self._run(lambda connection: connection.fetch(sql, *arguments))

    async def with_transaction(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Pass a connection inside a transaction to `transact` and to the migrator."""
        return await self._run(work, whole=True)

    async def close(self) -> None:
        try:
            await asyncio.wait_for(self._pool.close(), 5.0)
        except TimeoutError:
            self._pool.terminate()


async def _silence() -> AsyncIterator[Sequence[str]]:
    await asyncio.Event().wait()
    yield ()


SetUp = Callable[[Any], Coroutine[Any, Any, None]]


def _or_cut(set_up: SetUp) -> SetUp:
    """Terminate a connection that cannot be set up: asyncpg would close it politely and wait forever for a reply."""

    async def whole(connection: Any) -> None:
        try:
            await set_up(connection)
        except BaseException:
            connection.terminate()
            raise

    return whole


async def _set_up(connection: Any) -> None:
    await connection.set_type_codec("uuid", schema="pg_catalog", encoder=str, decoder=str, format="text")


async def _set_up_session(connection: Any) -> None:
    """Refuse a session without our settings: a pooler may be configured to ignore startup parameters."""
    await _set_up(connection)
    if await connection.fetchval("SELECT current_setting('enable_mergejoin')") != "off":
        raise StoreError(POOLER_NOT_SET)


@asynccontextmanager
async def _transaction(connection: Any) -> AsyncIterator[None]:
    """Open a transaction with our planner settings: they are sent with BEGIN and end with the transaction."""
    try:
        await connection.execute(BEGIN)
        yield
        await connection.execute("COMMIT")
    except BaseException:
        with suppress(*_AWAY, asyncpg.PostgresError):
            await connection.execute("ROLLBACK")
        raise


async def _leave(connection: Any) -> None:
    """Replace asyncpg's reset: there is no session state to reset."""


def _topics(payload: object) -> Sequence[str]:
    try:
        return decoding.decode(str(payload), list[str])
    except msgspec.MsgspecError:
        return ("*",)


def _from_pooler(error: Exception) -> bool:
    """Return whether only a pooler causes this: a refused startup parameter, or a statement of another session."""
    if not isinstance(error, asyncpg.PostgresError):
        return False
    return error.sqlstate in ("26000", "42P05") or "unsupported startup parameter" in str(error)


def _cause(error: Exception) -> str:
    """Return why an operation failed. asyncpg's own message for a connection cut during an operation is misleading."""
    if isinstance(error, asyncpg.InternalClientError | asyncpg.InterfaceError):
        return "the connection was cut in the middle of an operation"
    return str(error) or type(error).__name__


def _mapped(error: Exception, schema: str, role: str) -> HoldfastError:
    if _from_pooler(error):
        return StoreError(f"{POOLER_NOT_SET} ({error.args[0]})")
    if not isinstance(error, asyncpg.PostgresError) or isinstance(error, _AWAY):
        return StoreUnreachable(f"Postgres went away: {_cause(error)}")
    message = str(error.args[0])
    if isinstance(error, asyncpg.LockNotAvailableError):
        return LockTimeout(f"Postgres: {message}")
    if (error.sqlstate or "")[:2] in DATA_ERRORS:
        return Invalid("data", f"Postgres cannot store it: {message}")
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return permission_denied(message, schema=schema, role=role)
    if isinstance(error, asyncpg.DiskFullError):
        return StoreFull(f"Postgres: {message}")
    refused = error_from_sqlstate(error.sqlstate or "", message, error.detail)
    return refused or StoreError(f"Postgres: {message} ({error.sqlstate})")
