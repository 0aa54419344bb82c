"""`holdfast audit`: who changed what."""

import json
from typing import Annotated, Any

import typer

from holdfast.cli.session import AsJson, Cursor, print_json, with_client
from holdfast.cli.times import moment

app = typer.Typer()


@app.command()
def audit(
    context: typer.Context,
    who: Annotated[str | None, typer.Option(help="A token's name or id, or a name as the list shows it.")] = None,
    what: Annotated[str | None, typer.Option(help="An action, such as token.remove, or its first word.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Not before: a time, such as 2026-05-01 or 2026-05-01T12:00Z.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many.")] = 50,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List who changed tokens, tools, limits, queues, lanes, workers and jobs, newest first. For admins."""
    given = {
        "who": who,
        "what": what,
        "since": None if since is None else moment("--since", since).isoformat(),
        "limit": limit,
        "cursor": cursor,
    }
    query = {name: value for name, value in given.items() if value is not None}
    answer = with_client(context, lambda client: client.request("GET", "/v1/audit", query=query))
    if as_json:
        print_json(answer)
        return
    from holdfast.cli import render

    render.table(
        ("when", "who", "what", "on", "tenant", "change", "reason"),
        (
            (render.moment(i["done_at"]), i["actor"], i["action"], i["subject"], i["tenant"], _change(i), i["reason"])
            for i in answer["items"]
        ),
        empty="nothing was recorded",
    )
    render.more(answer["next_cursor"])


def _change(entry: dict[str, Any]) -> str | None:
    """Describe the difference briefly."""
    before, after = entry["before"] or {}, entry["after"] or {}
    parts = [f"{name}={_short(after[name])}" for name in after if before.get(name) != after[name] and name != "tools"]
    parts += [f"{name} was {_short(before[name])}" for name in before if before[name] != after.get(name)]
    return ", ".join(parts) or None


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
