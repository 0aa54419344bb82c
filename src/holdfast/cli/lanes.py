"""`holdfast lanes`: list, show, pause and resume lanes."""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from holdfast.cli import complete
from holdfast.cli.calls import ask, print_answer, print_facts
from holdfast.cli.job_text import short_id
from holdfast.cli.session import AsJson, Cursor, print_json

lanes = typer.Typer(help="Lanes: jobs that run one after the other.", invoke_without_command=True)

LaneName = Annotated[str, typer.Argument(metavar="LANE", help="Its name.", autocompletion=complete.lanes)]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many.")]


@lanes.callback(invoke_without_command=True)
def list_by_default(context: typer.Context, limit: Limit = 100, cursor: Cursor = None, as_json: AsJson = False) -> None:
    """List lanes: their state, who holds or blocks them, how many wait or run."""
    if context.invoked_subcommand is None:
        list_lanes(context, limit, cursor, as_json)


@lanes.command("ls")
def list_lanes(context: typer.Context, limit: Limit = 100, cursor: Cursor = None, as_json: AsJson = False) -> None:
    """List lanes: their state, who holds or blocks them, how many wait or run."""
    answer = ask(context, "GET", "/v1/lanes", limit=limit, cursor=cursor)
    if as_json:
        print_json(answer)
        return
    from holdfast.cli import render

    render.table(
        ("lane", "state", "head", "blocked by", "depth"),
        ((i["lane"], i["state"], short_id(i["head"]), _short_ids(i["blockers"]), i["depth"]) for i in answer["items"]),
        empty="no lanes",
    )
    render.more(answer["next_cursor"])


def _short_ids(ids: list[str]) -> str | None:
    return ", ".join(str(short_id(one)) for one in ids) or None


@lanes.command("show")
def show_lane(context: typer.Context, lane: LaneName, as_json: AsJson = False) -> None:
    """Show one lane: its state, head, blocking jobs, depth and readiness check."""
    print_facts(ask(context, "GET", _path(lane)), as_json)


@lanes.command("pause")
def pause_lane(context: typer.Context, lane: LaneName, as_json: AsJson = False) -> None:
    """Pause a lane: none of its jobs starts."""
    _move(context, lane, "pause", as_json)


@lanes.command("resume")
def resume_lane(context: typer.Context, lane: LaneName, as_json: AsJson = False) -> None:
    """Resume a paused lane."""
    _move(context, lane, "resume", as_json)


def _move(context: typer.Context, lane: str, verb: str, as_json: bool) -> None:
    answer: Any = ask(context, "POST", f"{_path(lane)}/{verb}")
    print_answer(answer, as_json, f"lane {lane} is {answer['state']}")


def _path(lane: str) -> str:
    return f"/v1/lanes/{quote(lane, safe='')}"
