"""`holdfast queues`: list, show, pause, resume and limit queues."""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from holdfast.cli import complete
from holdfast.cli.calls import ask, pick, print_answer, print_facts
from holdfast.cli.session import AsJson, print_json

queues = typer.Typer(help="Queues: pause, resume, caps.", invoke_without_command=True)

QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="Its name.", autocompletion=complete.queues)]


@queues.callback(invoke_without_command=True)
def list_by_default(context: typer.Context, as_json: AsJson = False) -> None:
    """List queues: their waiting and running jobs, and their limits."""
    if context.invoked_subcommand is None:
        list_queues(context, as_json)


@queues.command("ls")
def list_queues(context: typer.Context, as_json: AsJson = False) -> None:
    """List queues: their waiting and running jobs, and their limits."""
    answer = ask(context, "GET", "/v1/queues")
    if as_json:
        print_json(answer)
        return
    from holdfast.cli import render

    render.table(
        ("queue", "paused", "at most", "depth limit", "counts"),
        (
            (i["queue"], i["paused"], i["max_running"], i["max_depth"], render.counts(i["counts"]))
            for i in answer["items"]
        ),
        empty="no queues",
    )


@queues.command("show")
def show_queue(context: typer.Context, queue: QueueName, as_json: AsJson = False) -> None:
    """Show one queue: its waiting and running jobs, and its limits."""
    items = ask(context, "GET", "/v1/queues")["items"]
    print_facts(pick(items, lambda i: i["queue"] == queue, _missing(queue)), as_json)


def _missing(queue: str) -> str:
    return f"no queue {queue!r} has waiting or running jobs, or limits; `holdfast queues ls` lists them"


@queues.command("pause")
def pause_queue(context: typer.Context, queue: QueueName, as_json: AsJson = False) -> None:
    """Pause a queue: none of its jobs starts."""
    print_answer(ask(context, "POST", f"{_path(queue)}/pause"), as_json, f"queue {queue} is paused")


@queues.command("resume")
def resume_queue(context: typer.Context, queue: QueueName, as_json: AsJson = False) -> None:
    """Resume a paused queue."""
    print_answer(ask(context, "POST", f"{_path(queue)}/resume"), as_json, f"queue {queue} is resumed")


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
    given: dict[str, Any] = {"max_running": max_running, "max_depth": max_depth}
    body = {name: value or None for name, value in given.items() if value is not None}
    print_answer(ask(context, "PATCH", _path(queue), body), as_json, f"queue {queue} is limited")


def _path(queue: str) -> str:
    return f"/v1/queues/{quote(queue, safe='')}"
