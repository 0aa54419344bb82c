"""The options that describe a job: a flag for every field of a submit.

`JobOptions` declares them once; `takes_job_options` gives them to a command. A new field of the API needs an entry
here, and in the table of `tests/cli/test_submit_fields.py`, which fails until it has one. `job_description.py` builds
the job.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from holdfast.cli import complete

Command = Annotated[list[str] | None, typer.Argument(help="-- COMMAND ARGUMENT…")]
File = Annotated[
    str | None,
    typer.Option("--file", "-f", help="A job as TOML or JSON; - is the standard input. Options take precedence."),
]
Labels = Annotated[list[str] | None, typer.Option("--label", "-l", help="name=value.")]
Kind = Annotated[str | None, typer.Option("--kind", help="Your own name for this sort of job, for filters.")]
QueueName = Annotated[
    str | None,
    typer.Option("--queue", "-q", envvar="HOLDFAST_QUEUE", help="The job's queue.", autocompletion=complete.queues),
]
LaneName = Annotated[
    str | None,
    typer.Option("--lane", help="Jobs of one lane run one after the other.", autocompletion=complete.lanes),
]
Text = str | None
Texts = list[str] | None
Number = float | None
Count = int | None


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What the command line says about a job."""

    command: Command = None
    file: File = None
    tool: Annotated[Text, typer.Option(help="A tool's name, with --input.", autocompletion=complete.tools)] = None
    function: Annotated[Text, typer.Option(help="A function's name, with --input.")] = None
    image: Annotated[Text, typer.Option(help="Run the command, or the image's own, in a container of this image.")] = (
        None
    )
    runner: Annotated[Text, typer.Option(help="A runner's name, with --spec; for runners that were installed.")] = None
    spec: Annotated[Texts, typer.Option("--spec", help="name=value: any field of the runner's spec.")] = None
    inputs: Annotated[Texts, typer.Option("--input", "-i", help="name=value; a value that is JSON is parsed.")] = None
    inputs_from: Annotated[
        Text, typer.Option("--inputs", help="All inputs: a JSON object, or @FILE (TOML or JSON; @- is stdin).")
    ] = None
    env: Annotated[Texts, typer.Option("--env", "-e", help="NAME=value for the command.")] = None
    stdin: Annotated[Text, typer.Option(help="A file for the command's standard input; - is this one's.")] = None
    user: Annotated[Text, typer.Option(help="The user who runs the command.")] = None
    network: Annotated[Text, typer.Option(help="The container's network.")] = None
    memory: Annotated[Text, typer.Option(help="Limit of memory, such as 512m or 2g.")] = None
    cpus: Annotated[Number, typer.Option(help="Limit of processors of a container, such as 1.5.")] = None
    pids: Annotated[Count, typer.Option(help="Limit of processes.")] = None
    file_size: Annotated[Text, typer.Option(help="Limit of the size of one file, such as 1g.")] = None
    folder_size: Annotated[Text, typer.Option(help="Limit of the size of the work folder, such as 10g.")] = None
    require_result: Annotated[
        bool, typer.Option("--require-result", help="Fail the job if it leaves no result.json.")
    ] = False
    labels: Labels = None
    kind: Kind = None
    queue: QueueName = None
    lane: LaneName = None
    priority: Annotated[Count, typer.Option(help="Jobs with a higher number are claimed first; 0.")] = None
    needs: Annotated[
        Texts,
        typer.Option("--needs", help="A job that must succeed first; may be repeated.", autocompletion=complete.jobs),
    ] = None
    delay: Annotated[Text, typer.Option(help="Run it not before this time has passed: 90, 10min, 2h, 7d.")] = None
    at: Annotated[Text, typer.Option(help="Run it not before this time: 2026-05-01T12:00 (local), or with Z.")] = None
    hold: Annotated[bool, typer.Option("--hold", help="Keep the job pending until `release`.")] = False
    max_attempts: Annotated[Count, typer.Option(help="Maximum number of attempts.")] = None
    retry: Annotated[
        Texts, typer.Option("--retry", help="base=SECONDS, cap=SECONDS, on=failed,timed_out: when and what to retry.")
    ] = None
    on_lost: Annotated[Text, typer.Option(help="After a lost attempt: requeue, fail or pause.")] = None
    timeout: Annotated[Number, typer.Option(help="Time limit of an attempt in seconds.")] = None
    queue_timeout: Annotated[Number, typer.Option(help="Time limit of waiting in seconds.")] = None
    idle_timeout: Annotated[Number, typer.Option(help="Time limit without output in seconds.")] = None
    stop_grace: Annotated[Number, typer.Option(help="Seconds between a polite stop and a kill.")] = None
    stop_after: Annotated[Number, typer.Option(help="Seconds after which an attempt is asked to stop.")] = None
    budget: Annotated[Texts, typer.Option("--budget", help="name=number: a limit of what the job uses.")] = None
    reuse_key: Annotated[Text, typer.Option(help="Return the live or succeeded job of this key, if there is one.")] = (
        None
    )
    rebuild: Annotated[bool, typer.Option("--rebuild", help="With --reuse-key: run even if one succeeded.")] = False
    secrets: Annotated[Texts, typer.Option("--secret", help="The name of a secret that the job gets.")] = None
    uploads: Annotated[
        Texts,
        typer.Option("--upload", help="A file for the job's folder input/, or the id that `holdfast upload` printed."),
    ] = None
    check: Annotated[Text, typer.Option(help="A readiness check: a command that must succeed before the start.")] = None
    check_timeout: Annotated[Number, typer.Option(help="Time limit of the readiness check in seconds.")] = None
    connector: Annotated[Text, typer.Option(help="The connector of a pipeline in --file.")] = None
    snapshot: Annotated[Text, typer.Option(help="Which snapshots a pipeline stores: always, final or none.")] = None
    base: Annotated[Text, typer.Option(help="The snapshot that a pipeline starts from.")] = None
    job_id: Annotated[Text, typer.Option("--id", help="The job's id, a UUID that you choose.")] = None
    key: Annotated[Text, typer.Option(help="An idempotency key: a repeat returns the first call's job.")] = None


def takes_job_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options of a job; it gets them as its parameter `options`."""
    hints = get_type_hints(JobOptions, include_extras=True)
    declared = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in fields(JobOptions)
    ]
    own = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for one in inspect.signature(function, eval_str=True).parameters.values()
        if one.name != "options"
    ]
    names = {one.name for one in declared}

    @functools.wraps(function)
    def command(**given: Any) -> None:
        options = JobOptions(**{name: value for name, value in given.items() if name in names})
        function(options=options, **{name: value for name, value in given.items() if name not in names})

    parameters = [*own[:1], *declared, *own[1:]]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command
