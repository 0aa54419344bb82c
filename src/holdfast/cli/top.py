"""`holdfast top`: queues, workers, running jobs and the newest failures, live in the terminal."""

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.session import AsJson, print_json, with_client

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from holdfast.client.http import AsyncClient
    from holdfast.model import WorkerRecord
    from holdfast.response_types import JobView, QueueView

app = typer.Typer()

RUNNING, FAILED = 100, 5
BROKEN = ("failed", "timed_out", "paused")


@dataclass(frozen=True, kw_only=True)
class Overview:
    """What the server knows at one moment."""

    queues: "Sequence[QueueView]"
    workers: "Sequence[WorkerRecord]"
    running: "Sequence[JobView]"
    failed: "Sequence[JobView]"


@app.command()
def top(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Print the overview once, and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show queues, workers, running jobs and the newest failures, until Ctrl-C.

    If the output is not a terminal, the overview is printed once.
    """
    if as_json:
        print_json(with_client(context, read_overview))
    elif once or not sys.stdout.isatty():
        from holdfast.cli import render

        found = with_client(context, read_overview)
        for part in _parts(found, rows=RUNNING):
            render.console.print(part)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            with_client(context, lambda client: _show_live(client, interval))


async def read_overview(client: "AsyncClient") -> Overview:
    import asyncio

    queues, workers, (running, _), (failed, _) = await asyncio.gather(
        client.queues(),
        client.workers(),
        client.jobs(status=["running"], limit=RUNNING),
        client.jobs(status=BROKEN, limit=FAILED),
    )
    return Overview(queues=queues, workers=[one for one in workers if one.live], running=running, failed=failed)


async def _show_live(client: "AsyncClient", interval: float) -> None:
    """Show the overview until Ctrl-C; while the server is unreachable, show the last one and why."""
    import asyncio

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from holdfast.cli import render
    from holdfast.client.http import AWAY, Refused, ServerUnreachable

    found = await read_overview(client)  # A server that never answered is an immediate error.
    problem = ""
    with Live(console=render.console, screen=True, auto_refresh=False) as live:
        while True:
            rows = max(3, render.console.height - len(found.queues) - len(found.workers) - FAILED - 13)
            head = Text(problem or f"{client.url}, every {interval:g} s; Ctrl-C ends", style="dim")
            live.update(Group(head, *_parts(found, rows=rows)), refresh=True)
            await asyncio.sleep(interval)
            try:
                found, problem = await read_overview(client), ""
            except (ServerUnreachable, Refused) as error:
                if error.status not in AWAY:
                    raise
                problem = error.message


def _parts(found: Overview, *, rows: int) -> "list[RenderableType]":
    """Return the tables of an overview, with at most `rows` running jobs."""
    from rich.text import Text

    from holdfast.cli import render

    queues = render.grid(
        ("queue", "paused", "at most", "counts"),
        ((q.queue, q.paused, q.max_running, render.counts(_plain(q.counts))) for q in found.queues),
    )
    workers = render.grid(
        ("worker", "draining", "queues", "jobs", "seen"),
        ((w.worker, w.draining, render.slots(w.queues), len(w.jobs), w.seen_at) for w in found.workers),
    )
    running, failed = (render.grid(*render.job_rows(jobs)) for jobs in (found.running[:rows], found.failed))
    more = f", the newest {rows}" if len(found.running) > rows else ""
    parts: list[RenderableType] = []
    for title, grid, empty in (
        ("queues", queues, "no queues"),
        ("workers", workers, "no live worker; `holdfast worker` starts one"),
        (f"running{more}", running, "nothing runs"),
        ("newest failures", failed, "none"),
    ):
        parts += [Text(""), Text(title, style="bold underline"), grid if grid is not None else Text(empty)]
    return parts[1:]


def _plain(counts: object) -> dict[str, int]:
    import msgspec

    found: dict[str, int] = msgspec.to_builtins(counts)
    return found
