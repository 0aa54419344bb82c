"""The plans that our sessions on Postgres use: generic ones, made without a look at the values."""

import json
from datetime import datetime
from typing import Any

from holdfast.store.postgres import prepare


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
