"""`holdfast workers`: list, show and drain workers, and declare hosts lost."""

from typing import Annotated
from urllib.parse import quote

import typer

from holdfast.cli import complete
from holdfast.cli.calls import ask, pick, print_answer, print_facts
from holdfast.cli.session import AsJson, print_json

workers = typer.Typer(help="Workers: what they run; hosts that are gone.", invoke_without_command=True)

Host = Annotated[str, typer.Argument(help="A host, as `holdfast workers` names it.", autocompletion=complete.hosts)]
WorkerName = Annotated[
    str, typer.Argument(metavar="WORKER", help="Its id, or a host that has one.", autocompletion=complete.hosts)
]
EMPTY = "no live worker; `holdfast worker` starts one"


@workers.callback(invoke_without_command=True)
def list_by_default(context: typer.Context, as_json: AsJson = False) -> None:
    """List workers: their hosts, capabilities and running jobs."""
    if context.invoked_subcommand is None:
        list_workers(context, as_json)


@workers.command("ls")
def list_workers(context: typer.Context, as_json: AsJson = False) -> None:
    """List workers: their hosts, capabilities and running jobs."""
    answer = ask(context, "GET", "/v1/workers")
    if as_json:
        print_json(answer)
        return
    from holdfast.cli import render

    render.table(
        ("worker", "host", "live", "draining", "queues", "jobs"),
        (
            (i["worker"], i["host"], i["live"], i["draining"], render.slots(i["queues"]), len(i["jobs"]))
            for i in answer["items"]
        ),
        empty=EMPTY,
    )


@workers.command("show")
def show_worker(context: typer.Context, worker: WorkerName, as_json: AsJson = False) -> None:
    """Show one worker: its host, queues, capabilities and running jobs."""
    items = ask(context, "GET", "/v1/workers")["items"]
    named = [i for i in items if worker in (i["worker"], i["host"])]
    live = [i for i in named if i["live"]]
    missing = f"there is no worker {worker!r}; `holdfast workers ls` lists them"
    print_facts(pick(live or named, lambda i: True, missing), as_json)


@workers.command("drain")
def drain(context: typer.Context, host: Host, as_json: AsJson = False) -> None:
    """Drain a worker, or all workers of a host: they hand over and exit."""
    answer = ask(context, "POST", f"/v1/workers/{quote(host, safe='')}/drain")
    print_answer(answer, as_json, f"asked to drain: {', '.join(answer['workers']) or 'none'}")


@workers.command("lost")
def lost(context: typer.Context, host: Host, as_json: AsJson = False) -> None:
    """Declare that a host is gone for good: its running attempts are settled as lost."""
    answer = ask(context, "POST", f"/v1/workers/{quote(host, safe='')}/lost")
    print_answer(answer, as_json, f"{len(answer['jobs'])} jobs were settled as lost")
