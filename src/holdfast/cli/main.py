"""`holdfast`: the command line's entry. Each command says which settings it reads and exits as documented.

Exit codes: 0 done; 2 bad arguments or settings; 3 database not reachable; 4 refused.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from holdfast import __version__, config
from holdfast.assemble import api_of
from holdfast.cli import serve as http
from holdfast.cli import start
from holdfast.errors import ConfigError, HoldfastError, StoreUnreachable
from holdfast.store import migrate as migrations
from holdfast.store.queries import Dialect
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.store import connect

T = TypeVar("T")

app = typer.Typer(help="A durable execution queue: your jobs outlive your workers.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """holdfast: a durable execution queue and worker runtime."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def migrate(
    database_url: Annotated[
        str | None,
        typer.Option(envvar="HOLDFAST_DATABASE_URL", help="sqlite:///path or postgresql://host/name"),
    ] = None,
    schema: Annotated[
        str | None, typer.Option(envvar="HOLDFAST_SCHEMA", help="The schema of the tables on Postgres.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be applied; change nothing.")] = False,
    show_sql: Annotated[
        bool, typer.Option("--show-sql", help="Print the SQL of what is (or would be) applied.")
    ] = False,
) -> None:
    """Bring the database to this version of holdfast. Safe to run again, and by several at once."""
    try:
        settings = config.load({"database_url": database_url, "schema": schema})
    except ConfigError as error:
        _fail(error, 2)
    _run(_migrate(settings, dry_run, show_sql))


@app.command()
def worker(
    queue: Annotated[
        str,
        typer.Option(envvar="HOLDFAST_QUEUES", help="Queues and how many jobs of each at once: default:4,heavy:1."),
    ] = "default:4",
    application: Annotated[
        str | None,
        typer.Option("--app", envvar="HOLDFAST_APP", help="module:name of a Holdfast whose functions it runs."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End when nothing is left to claim.")] = False,
    worker_id: Annotated[
        str | None, typer.Option(envvar="HOLDFAST_WORKER_ID", help="Its id; it must never be used again.")
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(envvar="HOLDFAST_DATABASE_URL", help="sqlite:///path or postgresql://host/name"),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option("--data", envvar="HOLDFAST_DATA_DIR", help="The folder that all parts share.")
    ] = None,
) -> None:
    """Run jobs: adopt what a dead worker left running, then claim. SIGTERM hands over, a second one leaves at once."""
    try:
        settings, functions = start.configure(application, database_url=database_url, data_dir=data_dir)
        queues = start.parse_queues(queue)
    except ConfigError as error:
        _fail(error, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stuck = _run(start.run_worker(settings, queues, functions, once=once, worker_id=worker_id), fast=True)
    if stuck:
        os._exit(0)  # A function that does not end has been handed back; its thread must not keep the process.


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(envvar="HOLDFAST_HOST", help="The address to listen on. Default: 127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, typer.Option(envvar="HOLDFAST_PORT", help="The port to listen on. Default: 7070")
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(envvar="HOLDFAST_DATABASE_URL", help="sqlite:///path or postgresql://host/name"),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option("--data", envvar="HOLDFAST_DATA_DIR", help="The folder that all parts share.")
    ] = None,
) -> None:
    """Serve HTTP: submit, follow and steer jobs. The first start writes an admin's token to the data folder."""
    flags = {"host": host, "port": port, "database_url": database_url, "data_dir": data_dir}
    try:
        settings = config.load(flags)
    except ConfigError as error:
        _fail(error, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _run(http.serve(api_of(settings), settings))


async def _migrate(settings: config.Settings, dry_run: bool, show_sql: bool) -> None:
    database = await connect(settings.url, schema=settings.schema, connections=1, listen=False, pooler=settings.pooler)
    try:
        dialect: Dialect = "sqlite" if isinstance(database, SqliteDatabase) else "postgres"
        if dry_run:
            applied = migrations.pending(dialect, await migrations.version(database))
        else:
            applied = await migrations.migrate(database)
            await migrations.require_current(database)
        for migration in applied:
            typer.echo(f"{'would apply' if dry_run else 'applied'} {migration.number:04} {migration.name}")
            if show_sql:
                typer.echo(migrations.script(dialect, migration.number, settings.schema))
        if not applied:
            typer.echo("nothing to do: the schema is current")
    finally:
        await database.close()


def _run(work: Coroutine[Any, Any, T], *, fast: bool = False) -> T:
    """Run a command's work and say what went wrong. `fast`: on uvloop, where it is installed."""
    try:
        with asyncio.Runner(loop_factory=_fast_loop() if fast else None) as runner:
            return runner.run(work)
    except StoreUnreachable as error:
        _fail(error, 3)
    except ConfigError as error:
        _fail(error, 2)
    except HoldfastError as error:
        _fail(error, 4)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return None
    return uvloop.new_event_loop


def _fail(error: HoldfastError, code: int) -> NoReturn:
    typer.echo(f"holdfast: {error.message}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
