"""`holdfast upload`: files for later jobs."""

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.session import USAGE, AsJson, fail, print_json, with_client

app = typer.Typer()


@app.command()
def upload(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(help="The files.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Upload files for a job, and print the id for `submit --upload`; unused uploads expire after a day."""
    for file in files:
        if not file.is_file():
            fail(f"{file}: {'is a folder; give its files' if file.is_dir() else 'no such file'}", USAGE)
    made = with_client(context, lambda client: client.upload(*files))
    if as_json:
        print_json({"upload": made, "files": [{"path": one.name, "size": one.stat().st_size} for one in files]})
    else:
        typer.echo(made)
