"""Calls that commands about the installation share: ask the server, print its answer, pick one item of a list."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import typer

from holdfast.cli.session import REFUSED, fail, print_json, with_client
from holdfast.cli.terminal import say


def ask(context: typer.Context, method: str, path: str, body: Any = None, **query: Any) -> Any:
    """Make a call and return the answer as plain data."""
    given = {name: value for name, value in query.items() if value not in (None, False)}
    return with_client(context, lambda client: client.request(method, path, body=body, query=given))


def print_answer(answer: Any, as_json: bool, text: str) -> None:
    """Print the answer as JSON, or a sentence about it."""
    if as_json:
        print_json(answer)
    else:
        say(text)


def print_facts(answer: Mapping[str, Any], as_json: bool) -> None:
    """Print one thing: as JSON, or a line for each field that has a value."""
    if as_json:
        print_json(answer)
        return
    from holdfast.cli import render

    render.facts(answer)


def pick(items: list[dict[str, Any]], matches: Callable[[dict[str, Any]], bool], missing: str) -> dict[str, Any]:
    """Return the one item that matches, for things that the server only lists."""
    found = [item for item in items if matches(item)]
    if len(found) != 1:
        refuse(missing if not found else f"several match: {', '.join(str(next(iter(i.values()))) for i in found)}")
    return found[0]


def refuse(message: str) -> NoReturn:
    fail(message, REFUSED)
