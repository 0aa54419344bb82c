"""Submit inside the caller's own transaction, on the caller's connection.

The jobs exist once the caller commits; a rollback removes every trace. Nothing here commits, rolls back the caller's
work, or changes the session. A job with a lane or needs is accepted `unresolved`; any worker resolves it after the
commit, so the caller may idle in its transaction without blocking a lane.

No driver is imported here: a connection is recognised by the module of its class. Driver errors about the request
become ours. A deadlock, a timeout or a lost connection stays the driver's error, because the transaction belongs to
the caller, who decides whether to retry it.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from holdfast.errors import HoldfastError, Invalid
from holdfast.store import queries
from holdfast.store.database import Row
from holdfast.store.error_mapping import error_from_sqlstate
from holdfast.store.postgres_parameters import submit_parameters
from holdfast.store.submit_on_connection import submit_on_connection
from holdfast.submission import Accepted, Batch, Submission, build_batch

SubmitCall = tuple[Batch, str, bool]
"""What to submit, the schema, and whether to notify workers."""

Submitter = TypeVar("Submitter")

_SYNC = "a psycopg Connection or Cursor, a SQLAlchemy Connection or Session, a connection of Django, or a sqlite3 one"
_ASYNC = (
    "an asyncpg Connection, a psycopg AsyncConnection or AsyncCursor, or a SQLAlchemy AsyncConnection or AsyncSession"
)


def submit_inside(
    connection: Any,
    jobs: Sequence[Submission | Mapping[str, Any]],
    *,
    tenant: str = "default",
    key: str | None = None,
    schema: str = queries.DEFAULT_SCHEMA,
    wake: bool = True,
) -> list[Accepted]:
    """Accept jobs in the transaction that is open on this connection, all or none.

    Takes a psycopg Connection or Cursor, a SQLAlchemy Connection or Session (Postgres or SQLite), the `connection` of
    Django (Postgres by psycopg 3, or SQLite), or a sqlite3 Connection. `key` is an idempotency key. `schema` and `wake`
    (send a NOTIFY with the commit) are for Postgres.
    """
    submit = _submitter_for(connection, _SYNC_SUBMITTERS, _SYNC, "submit_inside_async", _ASYNC_SUBMITTERS)
    batch = build_batch(jobs, tenant, key)
    try:
        return batch.answer(submit(connection, (batch, schema, wake)))
    except Exception as error:
        ours = _ours(error)
        if ours is None:
            raise
        raise ours from error


async def submit_inside_async(
    connection: Any,
    jobs: Sequence[Submission | Mapping[str, Any]],
    *,
    tenant: str = "default",
    key: str | None = None,
    schema: str = queries.DEFAULT_SCHEMA,
    wake: bool = True,
) -> list[Accepted]:
    """Like `submit_inside`, on an asyncpg Connection, a psycopg AsyncConnection, or SQLAlchemy's asynchronous ones."""
    submit = _submitter_for(connection, _ASYNC_SUBMITTERS, _ASYNC, "submit_inside", _SYNC_SUBMITTERS)
    batch = build_batch(jobs, tenant, key)
    try:
        return batch.answer(await submit(connection, (batch, schema, wake)))
    except Exception as error:
        ours = _ours(error)
        if ours is None:
            raise
        raise ours from error


# One function per class of connection


def _psycopg(connection: Any, call: SubmitCall) -> Sequence[Row]:
    text, values = _statement(call, "%s")
    # Not connection.cursor(), whose class and rows are the caller's choice.
    with sys.modules["psycopg"].Cursor(connection, row_factory=_plain_rows) as cursor:
        return _rows(cursor.execute(text, values).fetchall())


def _psycopg_cursor(cursor: Any, call: SubmitCall) -> Sequence[Row]:
    return _psycopg(cursor.connection, call)


async def _psycopg_async(connection: Any, call: SubmitCall) -> Sequence[Row]:
    text, values = _statement(call, "%s")
    async with sys.modules["psycopg"].AsyncCursor(connection, row_factory=_plain_rows) as cursor:
        await cursor.execute(text, values)
        return _rows(await cursor.fetchall())


async def _psycopg_async_cursor(cursor: Any, call: SubmitCall) -> Sequence[Row]:
    return await _psycopg_async(cursor.connection, call)


async def _asyncpg(connection: Any, call: SubmitCall) -> Sequence[Row]:
    text, values = _statement(call, "$")
    return _rows(await connection.fetch(text, *values))


def _sqlalchemy(connection: Any, call: SubmitCall) -> Sequence[Row]:
    dialect = connection.dialect
    if dialect.name == "postgresql":
        text, values = _statement(call, "$" if dialect.paramstyle == "numeric_dollar" else "%s")
        return _rows(connection.exec_driver_sql(text, values).all())
    if dialect.name == "sqlite":
        # Starts the transaction that `connection.commit()` ends; a statement on the raw connection would not.
        connection.exec_driver_sql("SELECT 1").close()
        raw = connection.connection
        return submit_on_connection(raw.dbapi_connection, raw.driver_connection, call[0])
    raise Invalid("connection", f"uses {dialect.name}; jobs are stored in Postgres or SQLite")


def _sqlalchemy_session(session: Any, call: SubmitCall) -> Sequence[Row]:
    return _sqlalchemy(session.connection(), call)


async def _sqlalchemy_async(connection: Any, call: SubmitCall) -> Sequence[Row]:
    found: Sequence[Row] = await connection.run_sync(_sqlalchemy, call)
    return found


async def _sqlalchemy_async_session(session: Any, call: SubmitCall) -> Sequence[Row]:
    return await _sqlalchemy_async(await session.connection(), call)


def _django(connection: Any, call: SubmitCall) -> Sequence[Row]:
    connection.ensure_connection()
    raw = connection.connection
    names = _names(raw)
    if "psycopg.Connection" in names:
        return _psycopg(raw, call)
    if "sqlite3.Connection" in names:
        return _sqlite3(raw, call)
    raise Invalid("connection", f"of Django uses {names[0]}; jobs are stored in Postgres (psycopg 3) or SQLite")


def _sqlite3(connection: Any, call: SubmitCall) -> Sequence[Row]:
    return submit_on_connection(connection, connection, call[0])


_SYNC_SUBMITTERS = {
    "django.BaseDatabaseWrapper": _django,
    "django.ConnectionProxy": _django,
    "psycopg.Connection": _psycopg,
    "psycopg.Cursor": _psycopg_cursor,
    "sqlalchemy.Connection": _sqlalchemy,
    "sqlalchemy.Session": _sqlalchemy_session,
    "sqlalchemy.scoped_session": _sqlalchemy_session,
    "sqlite3.Connection": _sqlite3,
}
_ASYNC_SUBMITTERS = {
    "asyncpg.Connection": _asyncpg,
    "asyncpg.PoolConnectionProxy": _asyncpg,
    "psycopg.AsyncConnection": _psycopg_async,
    "psycopg.AsyncCursor": _psycopg_async_cursor,
    "sqlalchemy.AsyncConnection": _sqlalchemy_async,
    "sqlalchemy.AsyncSession": _sqlalchemy_async_session,
    "sqlalchemy.async_scoped_session": _sqlalchemy_async_session,
}


def _names(connection: Any) -> list[str]:
    """Return the names of a connection's class and its bases, by package."""
    return [f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(connection).__mro__]


def _submitter_for(
    connection: Any, submitters: Mapping[str, Submitter], accepted: str, twin: str, twins: Mapping[str, Any]
) -> Submitter:
    names = _names(connection)
    for name in names:
        if name in submitters:
            return submitters[name]
    if any(name in twins for name in names):
        raise Invalid("connection", f"{names[0]} is for {twin}; here it takes {accepted}")
    raise Invalid("connection", f"cannot submit on {names[0]}; it takes {accepted}")


# Postgres: one statement, the SQL function


@cache
def _text(schema: str, placeholder: str) -> tuple[str, tuple[str, ...]]:
    """Return the call of the SQL function in a driver's parameter style, and the parameters' names in order."""
    if not schema.isidentifier() or len(schema) > 60:
        raise Invalid("schema", f"{schema!r} is not a valid name: use letters, digits and underscores")
    (statement,) = queries.load("postgres")["submit"].statements
    text, slots = queries.positional(queries.in_schema(statement.text, schema))
    return text if placeholder == "$" else re.sub(r"\$\d+", placeholder, text), tuple(slot.name for slot in slots)


def _statement(call: SubmitCall, placeholder: str) -> tuple[str, tuple[Any, ...]]:
    batch, schema, wake = call
    text, names = _text(schema, placeholder)
    values = submit_parameters(batch, wake=wake)
    return text, tuple(values[name] for name in names)


def _plain_rows(_: Any) -> type[tuple[Any, ...]]:
    """A psycopg row factory."""
    return tuple


def _rows(found: Sequence[Any]) -> Sequence[Row]:
    return [{"id": row[0], "asked": row[1]} for row in found]


def _ours(error: BaseException) -> HoldfastError | None:
    """Return our own error if the driver's error is about the request or the schema."""
    for reported in _layers(error):
        sqlstate = getattr(reported, "sqlstate", None)
        if sqlstate is None:
            continue
        report = getattr(reported, "diag", None)
        if report is not None:  # psycopg
            return error_from_sqlstate(sqlstate, report.message_primary or "", report.message_detail)
        if hasattr(reported, "detail"):  # asyncpg
            return error_from_sqlstate(sqlstate, str(reported.args[0]), reported.detail)
    return None


def _layers(error: BaseException | None) -> Iterator[Any]:
    """Yield an error and the driver's error that SQLAlchemy wraps."""
    while error is not None:
        yield error
        error = getattr(error, "orig", None) or error.__cause__
