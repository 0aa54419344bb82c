"""Commands that follow a job: run, watch, logs. Ctrl-C asks what to do; a job that we detach from keeps running."""

import contextlib
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.job_description import describe, reads_stdin
from holdfast.cli.job_options import JobOptions, takes_job_options
from holdfast.cli.session import DONE, AsJson, JobId, exit_code, find_job, print_json, print_line, with_client
from holdfast.cli.terminal import say, write_line

if TYPE_CHECKING:
    import asyncio

    from rich.live import Live

    from holdfast.client.http import AsyncClient
    from holdfast.model import Event
    from holdfast.response_types import JobView

app = typer.Typer()

QUESTION = "\n[s]top the job, [d]etach and leave it running, or [g]o on? "


@app.command()
@takes_job_options
def run(
    context: typer.Context,
    options: JobOptions,
    no_stdin: Annotated[
        bool, typer.Option("--no-stdin", "-n", help="Do not pass this command's standard input on.")
    ] = False,
    here: Annotated[
        bool, typer.Option("--here", help="Run in this folder, by a worker of this host and user; for admins.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job, show its output as if it ran here, and exit with its exit code."""
    from holdfast.cli.here import in_this_folder, refuse_elsewhere
    from holdfast.cli.standard_input import read_standard_input, with_standard_input

    wanted = describe(options)
    passes = bool(options.command) and not (options.image or no_stdin or reads_stdin(options) or options.stdin)
    content = read_standard_input() if passes else b""
    if here:
        wanted = in_this_folder(wanted)

    async def work(client: "AsyncClient") -> int:
        if here:
            await refuse_elsewhere(client, wanted)
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            job = await with_standard_input(wanted, content, Path(folder)).submit(client)
        typer.echo(f"job {job.id}", err=True)
        return await _follow_run(client, job.id, as_json)

    raise typer.Exit(with_client(context, work))


async def _follow_run(client: "AsyncClient", job_id: str, as_json: bool) -> int:
    """Follow a job, say why it waits and how it ended, and return the exit code."""
    from holdfast.cli.wait_notice import WaitNotice

    notice = WaitNotice(client, job_id)

    def hear(event: "Event") -> None:
        notice.hear(event)
        _print_output(event, aside=as_json)

    async with notice.watching():
        ended = await follow_job(client, job_id, hear)
    if ended is None:
        typer.echo(f"detached; `holdfast watch {job_id}` shows the job again", err=True)
        return DONE
    if as_json:
        print_json(ended)
    elif ended.error is not None:
        say(f"holdfast: {ended.status}: {ended.error.message}", err=True)
    return exit_code(ended, own=True)


@app.command()
def logs(
    context: typer.Context,
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the output until the job ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a job's output: its stdout to stdout, its stderr to stderr."""

    async def work(client: "AsyncClient") -> int:
        found = await find_job(client, job_id)
        show = print_line if as_json else _print_output
        if follow:
            await client.get(
                found
            )  # A server that never answered is an immediate error; one that becomes unreachable is waited for.
            ended = await follow_job(client, found, show)
            return DONE if ended is None else exit_code(ended)
        after = 0
        while True:
            items, following = await client.events(found, after=after)
            for event in items:
                if as_json or event.type == "log":
                    show(event)
            if following is None:
                return DONE
            after = following

    raise typer.Exit(with_client(context, work))


@app.command()
def watch(context: typer.Context, job_id: JobId, as_json: AsJson = False) -> None:
    """Watch a job: status, progress, attempts and its last lines, live."""

    async def work(client: "AsyncClient") -> int:
        from rich.live import Live

        from holdfast.cli import render
        from holdfast.cli.live import LiveView

        found = await find_job(client, job_id)
        job = await client.get(found)  # As in `logs`.
        if as_json:
            ended = await follow_job(client, found, print_line)
        elif not render.console.is_terminal:
            ended = await follow_job(client, found, _print_all)
        else:
            view = LiveView(job)
            with Live(view.picture(), console=render.console, refresh_per_second=8) as live:

                def show(event: "Event") -> None:
                    view.hear(event)
                    live.update(view.picture())

                ended = await follow_job(client, found, show, pause=live)
        if ended is None:
            return DONE
        if not as_json:
            render.job(ended, await client.attempts(found))
        return exit_code(ended)

    raise typer.Exit(with_client(context, work))


def _print_output(event: "Event", *, aside: bool = False) -> None:
    """Print log lines as they are; `aside` on stderr, where they do not mix with JSON."""
    if event.type == "log":
        stream = sys.stderr if aside or event.data["stream"] == "stderr" else sys.stdout
        for line in event.data["lines"]:
            write_line(stream, line)
        stream.flush()


def _print_all(event: "Event") -> None:
    from holdfast.cli import render

    _print_output(event)
    if (line := render.event_line(event)) is not None:
        say(f"-- {line}", err=True)


async def follow_job(
    client: "AsyncClient",
    job_id: str,
    show: "Callable[[Event], object]",
    *,
    after: int = 0,
    pause: "Live | None" = None,
) -> "JobView | None":
    """Show every event after `after` until the job ends or pauses, and return the job; None if the user detached."""
    import asyncio

    from holdfast.client.http import Refused

    pressed = asyncio.Event()
    with _on_interrupt(pressed):
        following = asyncio.ensure_future(_show_all(client, job_id, show, after))
        try:
            while not following.done():
                asked = asyncio.ensure_future(pressed.wait())
                await asyncio.wait([following, asked], return_when=asyncio.FIRST_COMPLETED)
                asked.cancel()
                if not pressed.is_set() or following.done():
                    continue
                pressed.clear()
                if await _ask(client, job_id, pause, pressed) == "detach":
                    return None
            following.result()
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, Refused):
                await following
    return await client.get(job_id, reconnect=True)


async def _show_all(client: "AsyncClient", job_id: str, show: "Callable[[Event], object]", after: int) -> None:
    """Show all events until the job ends or needs a person."""
    from holdfast.model import Status

    async with contextlib.aclosing(client.follow(job_id, after=after)) as events:
        async for event in events:
            show(event)
            if event.type == "status" and event.data["status"] == Status.PAUSED:
                job = await client.get(job_id, reconnect=True)  # The job may have been resumed since.
                if job.status is Status.PAUSED and job.last_seq == event.seq:
                    return


async def _ask(client: "AsyncClient", job_id: str, pause: "Live | None", pressed: "asyncio.Event") -> str:
    """Ask what to do after Ctrl-C. Without a terminal nobody can answer, so the job is cancelled."""
    if pause is not None:
        pause.stop()
    asks = sys.stdin.isatty()
    answer = await _answer() if asks else "s"
    if answer.startswith("d"):
        return "detach"
    if answer.startswith("s"):
        await _stop(client, job_id, pressed, go_on=asks)
    if pause is not None:
        pause.start()
    return "stay"


async def _stop(client: "AsyncClient", job_id: str, pressed: "asyncio.Event", *, go_on: bool) -> None:
    """Cancel the job. Report an unreachable server, or a second Ctrl-C before it answers; `go_on`: keep following."""
    import asyncio

    from holdfast.client.http import AWAY, Refused, ServerUnreachable

    asking = asyncio.ensure_future(client.cancel(job_id, reason="stopped at the terminal"))
    again = asyncio.ensure_future(pressed.wait())
    try:
        await asyncio.wait([asking, again], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise ServerUnreachable(f"{client.url} has not answered yet")
        asking.result()
    except (ServerUnreachable, Refused) as error:
        if error.status not in AWAY:
            return  # The job has ended already, or we may not stop it: keep following it.
        message = f"{error.message}; job {job_id} may still be running"
        if not go_on:
            raise ServerUnreachable(message) from error
        typer.echo(f"holdfast: {message}", err=True)
    finally:
        asking.cancel()
        again.cancel()
        await asyncio.wait([asking, again])
        pressed.clear()


async def _answer() -> str:
    import asyncio

    typer.echo(QUESTION, err=True, nl=False)
    loop = asyncio.get_running_loop()
    line: Awaitable[str] = loop.run_in_executor(None, sys.stdin.readline)
    return (await line).strip().lower() or "g"


@contextlib.contextmanager
def _on_interrupt(pressed: "asyncio.Event") -> Iterator[None]:
    import asyncio
    import signal

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, pressed.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
