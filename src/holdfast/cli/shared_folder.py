"""`holdfast shared-folder`: shows which folder belongs to the database, and adopts another one."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer

from holdfast.cli.session import AsJson, print_json, run

shared_folder = typer.Typer(help="The shared folder: which one the database names.", invoke_without_command=True)

DatabaseUrl = Annotated[
    str | None, typer.Option(envvar="HOLDFAST_DATABASE_URL", help="sqlite:///path or postgresql://host/name")
]
DataDir = Annotated[
    str | None, typer.Option("--data", envvar="HOLDFAST_DATA_DIR", help="The folder that all parts share.")
]


class FolderReport(msgspec.Struct, frozen=True, kw_only=True):
    """The shared folder of these settings, and the one that the database names."""

    path: str
    id: str | None
    recorded_id: str | None
    recorded_path: str | None
    problem: str | None


@shared_folder.callback(invoke_without_command=True)
def show(
    context: typer.Context, database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Show the shared folder of these settings and the one that the database names; exit 1 if they differ."""
    if context.invoked_subcommand is not None:
        return
    _print(run(lambda: _inspect({"database_url": database_url, "data_dir": data_dir}, adopting=False)), as_json)


@shared_folder.command("adopt")
def adopt(database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Make the folder of these settings the one that the database names: it was moved, or restored without its id.

    Servers and workers that run with the old one must be restarted.
    """
    _print(run(lambda: _inspect({"database_url": database_url, "data_dir": data_dir}, adopting=True)), as_json)


async def _inspect(flags: Mapping[str, object], *, adopting: bool) -> FolderReport:
    from holdfast import config
    from holdfast.assemble import connected
    from holdfast.errors import ConfigError
    from holdfast.runner import shared_folder as folders
    from holdfast.store.audit import local_actor
    from holdfast.store.shared_folder import SharedFolderRecord

    settings = config.load(flags)
    async with await connected(settings, connections=1, listen=False) as store:
        installation = await store.installation()
        if adopting:
            record = SharedFolderRecord(store.database, by=local_actor("cli"))
            await folders.adopt(settings.shared, installation, record)
        recorded = await store.shared_folder.read()
        try:
            found = folders.read_id(settings.shared)
        except OSError as error:
            raise ConfigError([f"the shared folder {settings.shared} cannot be read: {error.strerror}"]) from error
        return FolderReport(
            path=str(settings.shared),
            id=found.id if found else None,
            recorded_id=recorded.id if recorded else None,
            recorded_path=recorded.path if recorded else None,
            problem=folders.mismatch(settings.shared, installation, found, recorded),
        )


def _print(shown: FolderReport, as_json: bool) -> None:
    if as_json:
        print_json(shown)
    else:
        typer.echo(f"{shown.path}   id {shown.id or 'none'}")
        if shown.recorded_id is None:
            typer.echo("the database names none yet: the first server or worker to start records this one")
        else:
            typer.echo(f"the database names id {shown.recorded_id}, recorded at {shown.recorded_path}")
        if shown.problem is not None:
            typer.echo(shown.problem, err=True)
    if shown.problem is not None:
        raise typer.Exit(1)
