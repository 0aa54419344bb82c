"""How commands call the server: shared options, one client per command, and the exit codes of errors."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from holdfast.cli import complete
from holdfast.cli.terminal import say, visible_json
from holdfast.errors import ConfigError, HoldfastError, StoreUnreachable

if TYPE_CHECKING:
    import asyncio

    from holdfast.client.http import AsyncClient, Refused
    from holdfast.model import Event, Job
    from holdfast.response_types import JobView

T = TypeVar("T")

DONE, FAILED, USAGE, UNREACHABLE, REFUSED, PAUSED, TIMED_OUT, CANCELLED = 0, 1, 2, 3, 4, 5, 124, 130
FULL_ID, LEAST = 36, 6
CANDIDATES, CANDIDATE_WIDTH = 5, 29

AsJson = Annotated[bool, typer.Option("--json", envvar="HOLDFAST_JSON", help="Print JSON.")]
JobId = Annotated[
    str,
    typer.Argument(
        help="The job's id, its last 6 characters or more, or its beginning.",
        autocompletion=complete.jobs,
        show_default=False,
    ),
]
Cursor = Annotated[str | None, typer.Option("--cursor", help="Where the last page ended.")]
ReasonOption = Annotated[
    str | None, typer.Option("--reason", envvar="HOLDFAST_REASON", help="The reason, kept in the job's history.")
]


@dataclass(frozen=True)
class ServerAddress:
    """The server that a command calls, and the credentials."""

    url: str | None = None
    token: str | None = None
    tenant: str | None = None

    def client(self) -> "AsyncClient":
        from holdfast.client.http import AsyncClient

        return AsyncClient(self.url, token=self.token, tenant=self.tenant)


def with_client(context: typer.Context, work: "Callable[[AsyncClient], Awaitable[T]]") -> T:
    """Open a client, do the work, and exit with the code of its error."""
    server: ServerAddress = context.obj

    async def whole() -> T:
        async with server.client() as client:
            return await work(client)

    return run(whole)


def run(work: Callable[[], Awaitable[T]], *, fast: bool = False) -> T:
    """Run a command's work and print its error. `fast`: on uvloop, if it is installed."""
    import asyncio

    _leave_out_httpx_commands()
    from holdfast.client.http import Refused, ServerUnreachable

    async def whole() -> T:
        return await work()

    try:
        with asyncio.Runner(loop_factory=_fast_loop() if fast else None) as runner:
            return runner.run(whole())
    except (ServerUnreachable, StoreUnreachable) as error:
        hint = "\nIs it running? `holdfast up` starts one." if isinstance(error, ServerUnreachable) else ""
        fail(error.message + hint, UNREACHABLE)
    except (ConfigError, Ambiguous) as error:
        fail(error.message, USAGE)
    except Refused as error:
        fail(_refusal(error), USAGE if error.status == 422 else REFUSED)
    except HoldfastError as error:
        fail(error.message, REFUSED)


def _leave_out_httpx_commands() -> None:
    """Make httpx's own command line look uninstalled.

    It loads click and Pygments, which takes an eighth of the time of `holdfast ls`.
    """
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]


def _fast_loop() -> "Callable[[], asyncio.AbstractEventLoop] | None":
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _refusal(error: "Refused") -> str:
    if error.status == 401:
        return f"{error.message}\nSet HOLDFAST_TOKEN, or run where the server's data folder is."
    return error.message


def fail(message: str, code: int) -> NoReturn:
    say(f"holdfast: {message}", err=True)
    raise typer.Exit(code)


class Ambiguous(HoldfastError):
    """A part of an id matches several jobs, or none."""


async def find_job(client: "AsyncClient", text: str) -> str:
    """Return the job id that ends or begins with this text."""
    if len(text) == FULL_ID:
        return text
    found, _ = await client.jobs(id=text, limit=CANDIDATES + 1)
    if not found:
        short = f"; the end of an id needs at least {LEAST} characters" if len(text) < LEAST else ""
        raise Ambiguous(f"no job's id ends or begins with {text!r}{short}; `holdfast ls` lists them")
    if len(found) > 1:
        raise Ambiguous(_candidates(text, found))
    return found[0].id


def _candidates(text: str, found: "Sequence[JobView]") -> str:
    """List the jobs that a part of an id may mean."""
    from holdfast.cli.job_text import what

    lines = [f"  {job.id}  {job.status:<9}  {what(job)[:CANDIDATE_WIDTH]}" for job in found[:CANDIDATES]]
    if len(found) > CANDIDATES:
        lines.append("  …")
    return f"{text!r} is a part of several ids; give more characters of one of them:\n" + "\n".join(lines)


def exit_code(job: "Job", *, own: bool = False) -> int:
    """Return the exit code for a job's end; with `own`, the command's own code."""
    from holdfast.model import Status

    match job.status:
        case Status.SUCCEEDED:
            return DONE
        case Status.TIMED_OUT:
            return TIMED_OUT
        case Status.CANCELLED:
            return CANCELLED
        case Status.PAUSED:
            return PAUSED
        case Status.FAILED if own and job.exit_code:
            return job.exit_code
    return FAILED


def print_json(value: Any) -> None:
    import json

    import msgspec

    text = json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False)
    sys.stdout.write(visible_json(text) + "\n")


def print_line(event: "Event") -> None:
    """Print an event as one line of JSON, flushed at once for a reader that follows."""
    import msgspec

    sys.stdout.write(visible_json(msgspec.json.encode(event).decode()) + "\n")
    sys.stdout.flush()
