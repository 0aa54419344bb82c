"""`holdfast tools`: list and show the tools that jobs can name."""

from typing import Annotated

import typer

from holdfast.cli import complete
from holdfast.cli.calls import ask, pick, print_facts
from holdfast.cli.session import AsJson, print_json

tools = typer.Typer(help="Tools: jobs that an operator defined by name.", invoke_without_command=True)

ToolName = Annotated[str, typer.Argument(metavar="TOOL", help="Its name.", autocompletion=complete.tools)]


@tools.callback(invoke_without_command=True)
def list_by_default(context: typer.Context, as_json: AsJson = False) -> None:
    """List the tools that jobs can name."""
    if context.invoked_subcommand is None:
        list_tools(context, as_json)


@tools.command("ls")
def list_tools(context: typer.Context, as_json: AsJson = False) -> None:
    """List the tools that jobs can name."""
    answer = ask(context, "GET", "/v1/tools")
    if as_json:
        print_json(answer)
        return
    from holdfast.cli import render

    render.table(
        ("tool", "runner", "about"),
        ((i["name"], i["runner"], i["description"]) for i in answer["items"]),
        empty="no tools",
    )


@tools.command("show")
def show_tool(context: typer.Context, tool: ToolName, as_json: AsJson = False) -> None:
    """Show one tool, and the JSON Schema of its inputs."""
    items = ask(context, "GET", "/v1/tools")["items"]
    missing = f"there is no tool {tool!r}; `holdfast tools ls` lists them"
    print_facts(pick(items, lambda i: i["name"] == tool, missing), as_json)
