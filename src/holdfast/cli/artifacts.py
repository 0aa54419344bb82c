"""`holdfast artifacts`: list and fetch the files that a job left."""

import shutil
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.job_text import size
from holdfast.cli.session import REFUSED, USAGE, AsJson, JobId, fail, find_job, print_json, with_client
from holdfast.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.client.http import AsyncClient
    from holdfast.response_types import ArtifactView

artifacts = typer.Typer(help="Artifacts: the files that a job left in output/.", no_args_is_help=True)

STDOUT = "-"


@artifacts.command("ls")
def list_artifacts(context: typer.Context, job_id: JobId, as_json: AsJson = False) -> None:
    """List the artifacts of a job's last ended attempt."""

    async def read(client: "AsyncClient") -> "Sequence[ArtifactView]":
        return await client.artifacts(await find_job(client, job_id))

    items = with_client(context, read)
    if as_json:
        print_json({"items": items})
        return
    from holdfast.cli import render

    render.table(("path", "size"), ((one.path, size(one.size)) for one in items), empty="no artifacts")


@artifacts.command("get")
def get_artifacts(
    context: typer.Context,
    job_id: JobId,
    path: Annotated[str | None, typer.Argument(help="One artifact, as `artifacts ls` names it; else all.")] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", help="Where to: a file or a folder, - for stdout. All: a folder, else the job's id."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    as_json: AsJson = False,
) -> None:
    """Save one artifact of a job, or all of them into a folder."""
    if output == STDOUT and (path is None or as_json):
        fail("-o - prints one artifact: name it, without --json", USAGE)

    async def work(client: "AsyncClient") -> list[Path]:
        found = await find_job(client, job_id)
        if output == STDOUT and path is not None:
            await _print(client, found, path)
            return []
        if path is not None:
            target = _target(path, output)
            _refuse_existing(() if force else [target])
            return [await _save(client, found, path, target)]
        folder = Path(output or found)
        items = await client.artifacts(found)
        targets = [folder / _relative(one.path) for one in items]
        _refuse_existing(() if force else targets)
        return [await _save(client, found, one.path, to) for one, to in zip(items, targets, strict=True)]

    saved = with_client(context, work)
    if as_json:
        print_json({"files": [str(one) for one in saved]})
        return
    for one in saved:
        say(str(one))
    if not saved and output != STDOUT:
        say("no artifacts", err=True)


async def _print(client: "AsyncClient", job_id: str, path: str) -> None:
    """Print an artifact once it is complete, so that a download that fails in the middle prints nothing."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        target = Path(folder) / "artifact"
        await client.download(job_id, path, target)
        with target.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _refuse_existing(targets: "Iterable[Path]") -> None:
    """Refuse to replace files, before the first one is fetched."""
    for target in targets:
        if target.exists():
            fail(f"{target} exists; --force replaces it, -o names another file or folder", REFUSED)


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


async def _save(client: "AsyncClient", job_id: str, path: str, target: Path) -> Path:
    try:
        _make_folder(target.parent)
        await client.download(job_id, path, target)
    except OSError as error:
        fail(f"{target}: {error.strerror}", USAGE)
    return target


def _target(path: str, output: str | None) -> Path:
    """Return the file for one artifact."""
    name = _relative(path).name
    if output is None:
        return Path(name)
    target = Path(output)
    return target / name if target.is_dir() or output.endswith("/") else target


def _relative(path: str) -> PurePosixPath:
    """Refuse a path that would leave the folder, whatever a server says."""
    found = PurePosixPath(path)
    if found.is_absolute() or ".." in found.parts or not found.name:
        fail(f"{path!r} is not the path of an artifact", REFUSED)
    return found
