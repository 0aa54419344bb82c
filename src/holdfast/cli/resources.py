"""Commands about the installation: lanes, queues, workers, tools, tokens."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer

from holdfast.cli import complete
from holdfast.cli.session import AsJson, print_json, with_client
from holdfast.cli.terminal import say

lanes = typer.Typer(help="Lanes: jobs that run one after the other.", invoke_without_command=True)
queues = typer.Typer(help="Queues: pause, resume, caps.", invoke_without_command=True)
workers = typer.Typer(help="Workers: what they run; hosts that are gone.", invoke_without_command=True)
tokens = typer.Typer(help="Tokens: who may do what.", invoke_without_command=True)
app = typer.Typer()

LaneName = Annotated[str, typer.Argument(metavar="LANE", help="Its name.", autocompletion=complete.lanes)]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="Its name.", autocompletion=complete.queues)]
Host = Annotated[str, typer.Argument(help="A host, as `holdfast workers` names it.", autocompletion=complete.hosts)]
TokenName = Annotated[str, typer.Argument(help="The name shown in the history for its user.")]
TokenId = Annotated[str, typer.Argument(help="Its id, as `holdfast token` lists it.")]


def _table(columns: tuple[str, ...], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    from holdfast.cli import render

    render.table(columns, rows, empty=empty)


def _more(cursor: str | None) -> None:
    from holdfast.cli import render

    render.more(cursor)


def _moment(text: str | None) -> datetime | None:
    from holdfast.cli import render

    return None if text is None else render.moment(text)


def _ask(context: typer.Context, method: str, path: str, body: Any = None) -> Any:
    return with_client(context, lambda client: client.request(method, path, body=body))


def _done(answer: Any, as_json: bool, text: str) -> None:
    if as_json:
        print_json(answer)
    else:
        say(text)


@lanes.callback(invoke_without_command=True)
def list_lanes(
    context: typer.Context,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many.")] = 100,
    cursor: Annotated[str | None, typer.Option(help="Where the last page ended.")] = None,
    as_json: AsJson = False,
) -> None:
    """List lanes: their state, who holds or blocks them, how many wait or run."""
    if context.invoked_subcommand is not None:
        return
    query = {"limit": limit, "cursor": cursor}
    answer = with_client(context, lambda client: client.request("GET", "/v1/lanes", query=query))
    if as_json:
        print_json(answer)
        return
    _table(
        ("lane", "state", "head", "blocked by", "depth"),
        ((i["lane"], i["state"], i["head"], ", ".join(i["blockers"]) or None, i["depth"]) for i in answer["items"]),
        empty="no lanes",
    )
    _more(answer["next_cursor"])


@lanes.command("pause")
def pause_lane(context: typer.Context, lane: LaneName, as_json: AsJson = False) -> None:
    """Pause a lane: none of its jobs starts."""
    answer = _ask(context, "POST", f"/v1/lanes/{quote(lane, safe='')}/pause")
    _done(answer, as_json, f"lane {lane} is {answer['state']}")


@lanes.command("resume")
def resume_lane(context: typer.Context, lane: LaneName, as_json: AsJson = False) -> None:
    """Resume a paused lane."""
    answer = _ask(context, "POST", f"/v1/lanes/{quote(lane, safe='')}/resume")
    _done(answer, as_json, f"lane {lane} is {answer['state']}")


@queues.callback(invoke_without_command=True)
def list_queues(context: typer.Context, as_json: AsJson = False) -> None:
    """List queues: their waiting and running jobs, and their limits."""
    if context.invoked_subcommand is not None:
        return
    answer = _ask(context, "GET", "/v1/queues")
    if as_json:
        print_json(answer)
        return
    _table(
        ("queue", "paused", "at most", "depth limit", "counts"),
        (
            (i["queue"], i["paused"], i["max_running"], i["max_depth"],
             " ".join(f"{name}={count}" for name, count in i["counts"].items() if count))
            for i in answer["items"]
        ),
        empty="no queues",
    )  # fmt: skip


@queues.command("pause")
def pause_queue(context: typer.Context, queue: QueueName, as_json: AsJson = False) -> None:
    """Pause a queue: none of its jobs starts."""
    _done(_ask(context, "POST", f"/v1/queues/{quote(queue, safe='')}/pause"), as_json, f"queue {queue} is paused")


@queues.command("resume")
def resume_queue(context: typer.Context, queue: QueueName, as_json: AsJson = False) -> None:
    """Resume a paused queue."""
    _done(_ask(context, "POST", f"/v1/queues/{quote(queue, safe='')}/resume"), as_json, f"queue {queue} is resumed")


@queues.command("limit")
def limit_queue(
    context: typer.Context,
    queue: QueueName,
    max_running: Annotated[
        int | None, typer.Option(help="How many may run at once, over all workers; 0 removes the limit.")
    ] = None,
    max_depth: Annotated[int | None, typer.Option(help="How many may wait; 0 removes the limit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Set a queue's limits."""
    given = {"max_running": max_running, "max_depth": max_depth}
    body = {name: value or None for name, value in given.items() if value is not None}
    _done(_ask(context, "PATCH", f"/v1/queues/{quote(queue, safe='')}", body), as_json, f"queue {queue} is limited")


@workers.callback(invoke_without_command=True)
def list_workers(context: typer.Context, as_json: AsJson = False) -> None:
    """List workers: their hosts, capabilities and running jobs."""
    if context.invoked_subcommand is not None:
        return
    answer = _ask(context, "GET", "/v1/workers")
    if as_json:
        print_json(answer)
        return
    _table(
        ("worker", "host", "live", "draining", "queues", "jobs"),
        (
            (
                i["worker"],
                i["host"],
                i["live"],
                i["draining"],
                " ".join(f"{q}:{n}" for q, n in i["queues"].items()),
                len(i["jobs"]),
            )
            for i in answer["items"]
        ),
        empty="no live worker; `holdfast worker` starts one",
    )


@workers.command("drain")
def drain(context: typer.Context, host: Host, as_json: AsJson = False) -> None:
    """Drain a worker, or all workers of a host: they hand over and exit."""
    answer = _ask(context, "POST", f"/v1/workers/{quote(host, safe='')}/drain")
    _done(answer, as_json, f"asked to drain: {', '.join(answer['workers']) or 'none'}")


@workers.command("lost")
def lost(context: typer.Context, host: Host, as_json: AsJson = False) -> None:
    """Declare that a host is gone for good: its running attempts are settled as lost."""
    answer = _ask(context, "POST", f"/v1/workers/{quote(host, safe='')}/lost")
    _done(answer, as_json, f"{len(answer['jobs'])} jobs were settled as lost")


@app.command()
def tools(context: typer.Context, as_json: AsJson = False) -> None:
    """List the tools that jobs can name."""
    answer = _ask(context, "GET", "/v1/tools")
    if as_json:
        print_json(answer)
    else:
        _table(
            ("tool", "runner", "about"),
            ((i["name"], i["runner"], i["description"]) for i in answer["items"]),
            empty="no tools",
        )


@tokens.callback(invoke_without_command=True)
def list_tokens(context: typer.Context, as_json: AsJson = False) -> None:
    """List tokens. Their secrets are shown only once, when they are created."""
    if context.invoked_subcommand is not None:
        return
    answer = _ask(context, "GET", "/v1/tokens")
    if as_json:
        print_json(answer)
    else:
        _table(
            ("id", "name", "role", "tenant", "made by", "last used", "expires"),
            (
                (
                    i["id"],
                    i["name"],
                    i["role"],
                    i["tenant"],
                    i["created_by"],
                    _moment(i["used_at"]),
                    _moment(i["expires_at"]),
                )
                for i in answer["items"]
            ),
            empty="no tokens",
        )


@tokens.command("make")
def make_token(
    context: typer.Context,
    name: TokenName,
    role: Annotated[str, typer.Option(help="viewer, submitter, operator or admin.")] = "submitter",
    tenant: Annotated[str | None, typer.Option(help="Its tenant; only admin tokens have none.")] = "default",
    as_json: AsJson = False,
) -> None:
    """Create a token and print its secret, which is never shown again."""
    answer = _ask(
        context, "POST", "/v1/tokens", {"name": name, "role": role, "tenant": None if role == "admin" else tenant}
    )
    _done(answer, as_json, answer["token"])


@tokens.command("rm")
def remove_token(context: typer.Context, token_id: TokenId, as_json: AsJson = False) -> None:
    """Remove a token: it is no longer accepted."""
    _done(_ask(context, "DELETE", f"/v1/tokens/{quote(token_id, safe='')}"), as_json, "removed")
