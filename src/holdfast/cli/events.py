"""`holdfast events`: a job's history, by page or live."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.follow import follow_job
from holdfast.cli.session import DONE, AsJson, JobId, exit_code, find_job, print_line, with_client
from holdfast.cli.terminal import say

if TYPE_CHECKING:
    from holdfast.client.http import AsyncClient
    from holdfast.model import Event

app = typer.Typer()


@app.command()
def events(
    context: typer.Context,
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new events until the job ends.")] = False,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", "-t", help="Only events of this type, such as status; may be repeated."),
    ] = None,
    after: Annotated[int, typer.Option(min=0, help="Only events after this one: the number in the first column.")] = 0,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many, without --follow.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Print a job's events, oldest first, one per line."""
    wanted = frozenset(types or ())

    def show(event: "Event") -> None:
        if not wanted or event.type in wanted:
            print_line(event) if as_json else _print_event(event)

    async def work(client: "AsyncClient") -> int:
        found = await find_job(client, job_id)
        if follow:
            await client.get(found)  # A server that never answered is an immediate error.
            ended = await follow_job(client, found, show, after=after)
            return DONE if ended is None else exit_code(ended)
        items, following = await _page(client, found, wanted, after, limit)
        for event in items:
            show(event)
        if following is not None:
            say(f"more: --after {following}", err=True)
        return DONE

    raise typer.Exit(with_client(context, work))


async def _page(
    client: "AsyncClient", job_id: str, wanted: frozenset[str], after: int, limit: int
) -> "tuple[Sequence[Event], int | None]":
    """Return up to `limit` events of the wanted types, and where the next page begins."""
    found: list[Event] = []
    following: int | None = after
    while following is not None:
        items, following = await client.events(job_id, after=following, limit=limit)
        for event in items:
            if not wanted or event.type in wanted:
                found.append(event)
                if len(found) == limit:
                    last = event is items[-1] and following is None
                    return found, None if last else event.seq
    return found, None


def _print_event(event: "Event") -> None:
    from holdfast.cli import render

    head = f"{event.seq:>5}  {event.at.astimezone():%Y-%m-%d %H:%M:%S}  {event.type:<8}"
    if event.type == "log":
        for line in event.data["lines"]:
            say(f"{head}  {event.data['stream']}: {line}")
    else:
        task = f"{event.task}: " if event.task and event.type != "task" else ""
        say(f"{head}  {task}{render.event_line(event) or ''}")
    sys.stdout.flush()
