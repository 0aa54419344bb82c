"""Commands about jobs: submit, list, show, cancel, resume and the like."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli import complete
from holdfast.cli.job_description import describe
from holdfast.cli.job_options import JobOptions, Kind, Labels, LaneName, QueueName, takes_job_options
from holdfast.cli.option_values import numbers, pairs, parse_value
from holdfast.cli.session import AsJson, Cursor, JobId, ReasonOption, fail, find_job, print_json, with_client
from holdfast.cli.terminal import say

if TYPE_CHECKING:
    from holdfast.client.http import AsyncClient
    from holdfast.model import Attempt, TaskRecord
    from holdfast.response_types import Explanation, JobView

app = typer.Typer()
jobs = typer.Typer(help="Jobs: list, show, remove. The same commands as without `jobs`.", no_args_is_help=True)


@app.command()
@takes_job_options
def submit(context: typer.Context, options: JobOptions, as_json: AsJson = False) -> None:
    """Submit a job and print its id."""
    accepted = with_client(context, describe(options).submit)
    if as_json:
        print_json(accepted)
    else:
        typer.echo(accepted.id)


@app.command("ls")
@jobs.command("ls")
def list_jobs(
    context: typer.Context,
    status: Annotated[
        list[str] | None,
        typer.Option(help="Only jobs of this status; may be repeated.", autocompletion=complete.statuses),
    ] = None,
    kind: Kind = None,
    queue: QueueName = None,
    lane: LaneName = None,
    labels: Labels = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many.")] = 20,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    _refuse_unknown(status or [])
    wanted = pairs("--label", labels)

    async def read(client: "AsyncClient") -> "tuple[Sequence[JobView], str | None]":
        return await client.jobs(
            status=status or (), kind=kind, queue=queue, lane=lane, labels=wanted, limit=limit, cursor=cursor
        )

    items, following = with_client(context, read)
    if as_json:
        print_json({"items": items, "next_cursor": following})
        return
    from holdfast.cli import render

    render.jobs(items)
    render.more(following)


def _refuse_unknown(statuses: Sequence[str]) -> None:
    from holdfast.model import Status

    for one in statuses:
        if one not in list(Status):
            fail(f"--status {one!r}: use one of {', '.join(Status)}", 2)


@app.command()
@jobs.command()
def show(context: typer.Context, job_id: JobId, as_json: AsJson = False) -> None:
    """Show one job and its attempts."""

    async def read(client: "AsyncClient") -> "tuple[JobView, Sequence[Attempt], Sequence[TaskRecord]]":
        found = await find_job(client, job_id)
        return await client.get(found), await client.attempts(found), await client.tasks(found)

    job, attempts, tasks = with_client(context, read)
    if as_json:
        print_json(job)
    else:
        from holdfast.cli import render

        render.job(job, attempts)
        if tasks:
            render.tasks(tasks)


@app.command()
def explain(context: typer.Context, job_id: JobId, as_json: AsJson = False) -> None:
    """Explain why a job is not running."""

    async def read(client: "AsyncClient") -> "Explanation":
        return await client.explain(await find_job(client, job_id))

    why = with_client(context, read)
    if as_json:
        print_json(why)
        return
    for reason in why.reasons:
        say(reason.message)
    for task in why.plan.tasks if why.plan is not None else ():
        say(f"task {task.name}: {'cached' if task.cached else 'runs'}, {task.reason}")
    if not why.reasons:
        typer.echo("the job is ready: the next worker with a free slot claims it")


def _moved(context: typer.Context, verb: str, job_id: str, as_json: bool, **options: Any) -> None:
    async def move(client: "AsyncClient") -> "JobView":
        job: JobView = await getattr(client, verb)(await find_job(client, job_id), **options)
        return job

    job = with_client(context, move)
    if as_json:
        print_json(job)
        return
    from holdfast.cli import render

    if job.stop_request is not None and not job.status.terminal:
        render.console.print(f"{job.id}: {job.stop_request.kind} requested; the job is {render.coloured(job.status)}")
    else:
        render.console.print(f"{job.id}: {render.coloured(job.status)}")


@app.command()
def cancel(context: typer.Context, job_id: JobId, reason: ReasonOption = None, as_json: AsJson = False) -> None:
    """Cancel a job: a waiting one at once, a running one politely, then by force."""
    _moved(context, "cancel", job_id, as_json, reason=reason)


@app.command()
def interrupt(context: typer.Context, job_id: JobId, reason: ReasonOption = None, as_json: AsJson = False) -> None:
    """Interrupt a running job: it ends paused and can be resumed."""
    _moved(context, "interrupt", job_id, as_json, reason=reason)


@app.command()
def resume(
    context: typer.Context,
    job_id: JobId,
    reason: ReasonOption = None,
    budget: Annotated[
        list[str] | None, typer.Option(help="name=number: a new limit of the budget; may be repeated.")
    ] = None,
    stopped: Annotated[bool, typer.Option("--stopped", help="Confirms that the lost attempt no longer runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Queue a paused, failed, timed-out or cancelled job again."""
    raised = numbers("--budget", budget) if budget else None
    _moved(context, "resume", job_id, as_json, reason=reason, budget=raised, stopped=stopped)


@app.command()
def resolve(
    context: typer.Context,
    job_id: JobId,
    result: Annotated[str | None, typer.Option(help="The result to record, as JSON.")] = None,
    reason: ReasonOption = None,
    as_json: AsJson = False,
) -> None:
    """Mark a paused, failed or timed-out job as succeeded: a person has taken care of it."""
    _moved(context, "resolve", job_id, as_json, result=None if result is None else parse_value(result), reason=reason)


@app.command()
def dismiss(context: typer.Context, job_id: JobId, reason: ReasonOption = None, as_json: AsJson = False) -> None:
    """Dismiss a failed job, so that it no longer blocks its lane."""
    _moved(context, "dismiss", job_id, as_json, reason=reason)


@app.command()
def release(context: typer.Context, job_id: JobId, as_json: AsJson = False) -> None:
    """Queue a job that was submitted with --hold."""
    _moved(context, "release", job_id, as_json)


@app.command("rm")
@jobs.command("rm")
def remove(
    context: typer.Context,
    job_id: JobId,
    force: Annotated[bool, typer.Option("--force", help="Stop the job first if it runs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")] = False,
    reason: ReasonOption = None,
    as_json: AsJson = False,
) -> None:
    """Delete a job with its history and its files."""

    async def delete(client: "AsyncClient") -> str:
        return await client.delete(await find_job(client, job_id), force=force, dry_run=dry_run, reason=reason)

    outcome = with_client(context, delete)
    if as_json:
        print_json({"outcome": outcome})
    else:
        typer.echo(outcome.replace("_", " "))
