"""Commands about pipelines: plan, and list, show, remove and serve snapshots."""

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from holdfast.cli.calls import ask
from holdfast.cli.job_description import located_in
from holdfast.cli.job_file import read_object
from holdfast.cli.job_text import short_id, size
from holdfast.cli.session import AsJson, Cursor, print_json, run, with_client
from holdfast.cli.terminal import say

if TYPE_CHECKING:
    from holdfast.client.http import AsyncClient
    from holdfast.response_types import PlanView

app = typer.Typer()
snapshots = typer.Typer(help="Snapshots: stored results of pipeline tasks.", no_args_is_help=True)

SnapshotId = Annotated[str, typer.Argument(help="The snapshot's id, or the start of it.")]
SHORT = 12


@app.command()
def plan(
    context: typer.Context,
    file: Annotated[str, typer.Option("--file", "-f", help="A pipeline as TOML or JSON; - is the standard input.")],
    as_json: AsJson = False,
) -> None:
    """Show what a pipeline would do: which tasks would run, and what differs from known snapshots. Nothing runs."""
    source = read_object("--file", file)

    async def work(client: "AsyncClient") -> "PlanView":
        with located_in(source):
            return await client.plan(source.content)

    answer = with_client(context, work)
    if as_json:
        print_json(answer)
        return
    from holdfast.cli import render

    render.table(
        ("task", "", "snapshot", "why"),
        ((one.name, "cached" if one.cached else "runs", one.snapshot[:SHORT], one.reason) for one in answer.tasks),
        empty="no tasks",
    )


@snapshots.command("ls")
def list_snapshots(
    context: typer.Context,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many.")] = 20,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List snapshots, newest first."""
    answer = ask(context, "GET", "/v1/snapshots", limit=limit, cursor=cursor)
    if as_json:
        print_json(answer)
        return
    from holdfast.cli import render

    render.table(
        ("id", "task", "size", "made", "last used", "job"),
        (
            (one["id"][:SHORT], one["task"], size(one["size"]), render.moment(one["made_at"]),
             render.moment(one["used_at"]), short_id(one["job_id"]))
            for one in answer["items"]
        ),
        empty="no snapshots",
    )  # fmt: skip
    render.more(answer["next_cursor"])


@snapshots.command("show")
def show_snapshot(context: typer.Context, snapshot_id: SnapshotId, as_json: AsJson = False) -> None:
    """Show one snapshot and what it depends on."""
    answer = ask(context, "GET", f"/v1/snapshots/{quote(snapshot_id, safe='')}")
    if as_json:
        print_json(answer)
        return
    components = answer.pop("components")
    for name, value in {**answer, "size": size(answer["size"])}.items():
        say(f"{name:<10} {value}")
    for name, value in sorted(components.items()):
        say(f"  {name:<20} {value}")


@snapshots.command("rm")
def remove_snapshot(
    context: typer.Context,
    snapshot_id: SnapshotId,
    force: Annotated[bool, typer.Option("--force", help="Remove it even if it is in the plan of a job.")] = False,
    recurse: Annotated[bool, typer.Option("--recurse", help="Also remove all snapshots made from it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a snapshot that no job needs."""
    path = f"/v1/snapshots/{quote(snapshot_id, safe='')}"
    answer = ask(context, "DELETE", path, force=force, recurse=recurse, dry_run=dry_run)
    if as_json:
        print_json(answer)
        return
    for one in answer["snapshots"]:
        say(one)
    verb = "would remove" if dry_run else "removed"
    typer.echo(f"{verb} {len(answer['snapshots'])}, {size(answer['size'])}")


@snapshots.command("run")
def run_snapshot(
    context: typer.Context,
    snapshot_id: SnapshotId,
    command: Annotated[
        list[str] | None, typer.Argument(help="-- COMMAND ARGUMENT…: run it with the server, and exit with its code.")
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option("--data", envvar="HOLDFAST_DATA_DIR", help="The folder that all parts share.")
    ] = None,
) -> None:
    """Start a throw-away Postgres from a snapshot here, print its DSN, and remove it at the end (Ctrl-C)."""
    found = ask(context, "POST", f"/v1/snapshots/{quote(snapshot_id, safe='')}/use")

    async def serve() -> int:
        from holdfast import config
        from holdfast.cli.signals import EndedBySignal, ended_by_signals, run_beside, wait_for_a_signal
        from holdfast.pipeline.snapshots import SnapshotFolders
        from holdfast.pipeline.throwaway import throwaway
        from holdfast.runner.attempt_users import AttemptUsers
        from holdfast.runner.shared_folder import SharedFolder
        from holdfast.runner.users import uids_for, user_for

        settings = config.load({"data_dir": data_dir})
        SharedFolder(settings.shared, found["shared_folder"]).check()
        runs = settings.state / "runs"
        users = AttemptUsers(user_for(settings.process_user, settings.state), uids_for(settings), runs)
        folders = SnapshotFolders.below(settings.shared)
        copy = throwaway(folders, found["id"], found["folder"], found["digest"], runs, users)
        try:
            with ended_by_signals() as be_deaf, copy as server:
                try:
                    if command:
                        return run_beside(command, server.env)
                    with suppress(EndedBySignal):  # From here on Ctrl-C is a normal end.
                        typer.echo(server.dsn)
                        wait_for_a_signal()
                    return 0
                finally:
                    be_deaf()
        except EndedBySignal as ended:
            return ended.code

    raise typer.Exit(run(serve))


@snapshots.command("du")
def use_of_disk(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the number of snapshots and their total size."""
    totals = ask(context, "GET", "/v1/snapshots", limit=1)["totals"]
    if as_json:
        print_json(totals)
    else:
        typer.echo(f"{totals['count']} snapshots, {size(totals['size'])}")
