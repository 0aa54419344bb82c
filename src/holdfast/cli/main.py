"""`holdfast`: the entry point of the command line.

Every option has an environment variable: a setting's own name, else `HOLDFAST_<COMMAND>_<OPTION>`. Each command imports
what it needs when it runs, so that `--help` is quick.

Exit codes: 0 done; 1 the job failed (`run`: the command's own code); 2 bad arguments or settings; 3 server or database
not reachable; 4 refused; 5 paused, needs a person; 124 timed out; 130 cancelled.
"""

import os
from typing import Annotated

import typer

from holdfast import __version__
from holdfast.cli import (
    artifacts,
    audit,
    events,
    follow,
    jobs,
    lanes,
    queues,
    shared_folder,
    snapshots,
    tokens,
    tools,
    top,
    uploads,
    workers,
)
from holdfast.cli.session import AsJson, ServerAddress, print_json, run

app = typer.Typer(
    help="A durable execution queue: your jobs outlive your workers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"auto_envvar_prefix": "HOLDFAST"},
    pretty_exceptions_enable=False,
)
for commands in (follow.app, jobs.app, events.app, uploads.app, snapshots.app, top.app, audit.app):
    app.add_typer(commands)
app.add_typer(jobs.jobs, name="jobs")
app.add_typer(artifacts.artifacts, name="artifacts")
app.add_typer(lanes.lanes, name="lanes")
app.add_typer(queues.queues, name="queues")
app.add_typer(workers.workers, name="workers")
app.add_typer(tools.tools, name="tools")
app.add_typer(tokens.tokens, name="tokens")
app.add_typer(tokens.tokens, name="token", hidden=True)
app.add_typer(snapshots.snapshots, name="snapshots")
app.add_typer(shared_folder.shared_folder, name="shared-folder")

DatabaseUrl = Annotated[
    str | None, typer.Option(envvar="HOLDFAST_DATABASE_URL", help="sqlite:///path or postgresql://host/name")
]
DataDir = Annotated[
    str | None, typer.Option("--data", envvar="HOLDFAST_DATA_DIR", help="The folder that all parts share.")
]
Host = Annotated[str | None, typer.Option(envvar="HOLDFAST_HOST", help="The address to listen on: 127.0.0.1")]
Port = Annotated[int | None, typer.Option(envvar="HOLDFAST_PORT", help="The port to listen on: 7070")]
Queues = Annotated[
    str, typer.Option("--queue", envvar="HOLDFAST_QUEUES", help="Queues and how many jobs at once: default:4,heavy:1.")
]
Application = Annotated[
    str | None, typer.Option("--app", envvar="HOLDFAST_APP", help="module:name of a Holdfast whose functions to run.")
]


@app.callback()
def main(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(envvar="HOLDFAST_URL", help="The server: http://127.0.0.1:7070")] = None,
    token: Annotated[
        str | None, typer.Option(envvar="HOLDFAST_TOKEN", help="An API token; else the data folder's admin.token.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(envvar="HOLDFAST_TENANT", help="For admins: the tenant.")] = None,
) -> None:
    """holdfast: a durable execution queue and worker runtime."""
    context.obj = ServerAddress(url=url, token=token, tenant=tenant)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": __version__})
    else:
        typer.echo(__version__)


@app.command()
def up(
    data_dir: DataDir = None,
    host: Host = None,
    port: Port = None,
    workers: Annotated[
        int, typer.Option(envvar="HOLDFAST_WORKERS", min=0, help="Worker processes; 0 runs one inside the server.")
    ] = 0,
    queue: Queues = "default:4",
    application: Application = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Run everything here: migrate the database, then start the server and a worker."""
    from holdfast.cli import up as everything

    _log()
    flags = {"data_dir": data_dir, "host": host, "port": port, "database_url": database_url}
    if run(lambda: everything.run_all(flags, queue, application, workers)):
        os._exit(0)


@app.command()
def serve(
    host: Host = None,
    port: Port = None,
    application: Application = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Serve the HTTP API. The first start writes an admin token to the data folder.

    The server runs no jobs, unless HOLDFAST_QUEUE_ENABLED is false: then it runs each in the request that submits it.
    """
    from holdfast.cli import serve as http

    _log()
    flags = {"host": host, "port": port, "database_url": database_url, "data_dir": data_dir}
    run(lambda: http.run_server(flags, application))


@app.command()
def worker(
    queue: Queues = "default:4",
    application: Application = None,
    processes: Annotated[
        int,
        typer.Option(envvar="HOLDFAST_PROCESSES", min=1, help="Processes among which the slots are divided."),
    ] = 1,
    once: Annotated[bool, typer.Option("--once", help="Exit when nothing is left to claim.")] = False,
    worker_id: Annotated[
        str | None, typer.Option(envvar="HOLDFAST_WORKER_ID", help="The worker's id; it must never be reused.")
    ] = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Run jobs: adopt running attempts of dead workers, then claim. SIGTERM drains; a second one exits immediately."""
    _log()
    if processes > 1:
        from holdfast.cli import worker_processes

        options = worker_processes.WorkerOptions(application, once, worker_id, database_url, data_dir)
        raise typer.Exit(run(lambda: worker_processes.run_processes(queue, processes, options)))
    from holdfast.cli import worker_command
    from holdfast.cli.queue_option import parse_queues

    async def whole() -> bool:
        queues = parse_queues(queue)
        settings, functions = worker_command.configure(application, database_url=database_url, data_dir=data_dir)
        return await worker_command.run_worker(settings, queues, functions, once=once, worker_id=worker_id)

    if run(whole, fast=True):
        os._exit(0)  # The job of a stuck function is requeued; its thread must not keep the process alive.


@app.command()
def migrate(
    database_url: DatabaseUrl = None,
    schema: Annotated[
        str | None, typer.Option(envvar="HOLDFAST_SCHEMA", help="The schema of the tables on Postgres.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be applied; change nothing.")] = False,
    show_sql: Annotated[
        bool, typer.Option("--show-sql", help="Print the SQL of what is (or would be) applied.")
    ] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Migrate the database to this version of holdfast. Safe to repeat and to run concurrently."""
    from holdfast.cli import admin

    flags = {"database_url": database_url, "schema": schema, "data_dir": data_dir}
    applied = run(lambda: admin.migrate(flags, dry_run=dry_run, show_sql=show_sql))
    if as_json:
        print_json(applied)
        return
    for one in applied:
        typer.echo(f"{'would apply' if dry_run else 'applied'} {one.label}")
        if one.sql is not None:
            typer.echo(one.sql)
    if not applied:
        typer.echo("nothing to do: the schema is current")


@app.command()
def prune(
    days: Annotated[
        float | None,
        typer.Option(envvar="HOLDFAST_RETENTION_DAYS", help="Remove jobs that ended more than this many days ago."),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(envvar="HOLDFAST_KEEP_IDENTICAL", help="Of ended jobs with the same signature, keep this many."),
    ] = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove ended jobs that are past their retention period, now."""
    from holdfast.cli import admin

    flags = {
        "database_url": database_url, "data_dir": data_dir, "retention_days": days, "keep_identical": keep,
    }  # fmt: skip
    removed = run(lambda: admin.prune(flags))
    if as_json:
        print_json({"removed": removed})
    else:
        typer.echo(f"removed {removed} jobs")


@app.command()
def check(as_json: AsJson = False) -> None:
    """Check the settings and report every mistake."""
    from holdfast.cli import admin

    found = run(admin.check)
    if as_json:
        print_json(found)
        return
    for one in found:
        typer.echo(f"{one.name:<29} {one.value!s:<32} {one.about}")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check everything that a healthy installation needs, and say how to fix problems."""
    from holdfast.cli import admin

    findings = run(admin.examine_all)
    if as_json:
        print_json(findings)
    for finding in () if as_json else findings:
        typer.echo(f"{'ok  ' if finding.ok else 'BAD '} {finding.what:<14} {finding.text}")
        if not finding.ok and finding.fix:
            typer.echo(f"     {'':<14} → {finding.fix}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command()
def bench(as_json: AsJson = False) -> None:
    """Measure this installation's database: submit, claim and finish, in a scratch schema of its own."""
    from holdfast.cli import admin

    measured = run(admin.bench)
    if as_json:
        print_json(measured)
        return
    typer.echo(f"submit in bulk           {measured.submit_per_second:>10,.0f} jobs/s")
    typer.echo(f"claim and finish by {measured.batch}  {measured.run_per_second:>10,.0f} jobs/s")


def _log() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


if __name__ == "__main__":
    app()
