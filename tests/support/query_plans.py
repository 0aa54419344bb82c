"""The plans that our sessions use. Those of Postgres are generic ones, made without a look at the values."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from holdfast.store import queries
from holdfast.store.postgres_parameters import prepare
from holdfast.store.sqlite_connection import Connection
from holdfast.timing import SystemClock


@contextmanager
def sqlite_connection(path: Path, *, writes: bool) -> Iterator[Connection]:
    """A connection such as the store's own, closed when the block ends."""
    connection = Connection(path, SystemClock(), writes=writes)
    with closing(connection.raw):
        yield connection


def sqlite_explain(
    connection: Connection, statement: queries.Statement, *, how: str = "EXPLAIN QUERY PLAN"
) -> list[str]:
    """The lines of a statement's plan; SQLite makes the same one for all values."""
    blank: Any = [None] * len(statement.parameters)
    if not statement.each:
        blank = dict(zip(statement.parameters, blank, strict=True))
    return [row[3] for row in connection.raw.execute(f"{how} {statement.text}", blank)]


async def plan_of(connection: Any, name: str, parameters: dict[str, Any], *, run: bool = True) -> list[dict[str, Any]]:
    """The nodes of a statement's plan, with what they did if it is run.

    It is prepared and executed, as a driver does: a plan that is explained with its values may be another one.
    """
    statement = prepare("holdfast")[name]
    values = ", ".join(map(_literal, statement.arguments(parameters)))
    await connection.execute(f"PREPARE explained AS {statement.text}")
    how = "FORMAT JSON, ANALYZE, BUFFERS" if run else "FORMAT JSON"
    answer = await connection.fetchval(f"EXPLAIN ({how}) EXECUTE explained({values})")
    await connection.execute("DEALLOCATE explained")
    return plan_nodes(json.loads(answer)[0]["Plan"])


async def generic_plan(connection: Any, name: str) -> list[dict[str, Any]]:
    """The nodes of the plan that a session uses for a statement whatever its values; nothing is run."""
    statement = prepare("holdfast")[name]
    nothing = ", ".join(["NULL"] * len(statement.slots))
    await connection.execute(f"PREPARE explained AS {statement.text}")
    answer = await connection.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE explained{f'({nothing})' if nothing else ''}")
    await connection.execute("DEALLOCATE explained")
    return plan_nodes(json.loads(answer)[0]["Plan"])


def plan_nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in plan_nodes(child))]


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    text = "{" + ",".join(map(_element, value)) + "}" if isinstance(value, list | tuple) else _text(value)
    return "'" + text.replace("'", "''") + "'"


def _element(value: Any) -> str:
    """An element of an array, in the array's own quotes."""
    return "NULL" if value is None else json.dumps(_text(value), ensure_ascii=False)


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
