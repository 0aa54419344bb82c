"""`holdfast tokens`: list, show, create and remove API tokens."""

from typing import Annotated
from urllib.parse import quote

import typer

from holdfast.cli.calls import ask, pick, print_answer, print_facts
from holdfast.cli.session import AsJson, print_json

tokens = typer.Typer(help="Tokens: who may do what.", invoke_without_command=True)

TokenName = Annotated[str, typer.Argument(help="The name shown in the history for its user.")]
TokenId = Annotated[str, typer.Argument(help="Its id, as `holdfast tokens` lists it.")]


@tokens.callback(invoke_without_command=True)
def list_by_default(context: typer.Context, as_json: AsJson = False) -> None:
    """List tokens. Their secrets are shown only once, when they are created."""
    if context.invoked_subcommand is None:
        list_tokens(context, as_json)


@tokens.command("ls")
def list_tokens(context: typer.Context, as_json: AsJson = False) -> None:
    """List tokens. Their secrets are shown only once, when they are created."""
    answer = ask(context, "GET", "/v1/tokens")
    if as_json:
        print_json(answer)
        return
    from holdfast.cli import render

    render.table(
        ("id", "name", "role", "tenant", "made by", "last used", "expires"),
        (
            (i["id"], i["name"], i["role"], i["tenant"], i["created_by"],
             render.moment(i["used_at"]), render.moment(i["expires_at"]))
            for i in answer["items"]
        ),
        empty="no tokens",
    )  # fmt: skip


@tokens.command("show")
def show_token(context: typer.Context, token_id: TokenId, as_json: AsJson = False) -> None:
    """Show one token, without its secret."""
    items = ask(context, "GET", "/v1/tokens")["items"]
    missing = f"there is no token {token_id!r}; `holdfast tokens ls` lists their ids"
    print_facts(pick(items, lambda i: i["id"] == token_id, missing), as_json)


@tokens.command("create")
@tokens.command("make", hidden=True)
def make_token(
    context: typer.Context,
    name: TokenName,
    role: Annotated[str, typer.Option(help="viewer, submitter, operator or admin.")] = "submitter",
    tenant: Annotated[str | None, typer.Option(help="Its tenant; only admin tokens have none.")] = "default",
    expires: Annotated[
        str | None, typer.Option(help="When it expires: a time such as 2027-01-31, or a delay such as 90d.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and print its secret, which is never shown again."""
    from holdfast.cli.times import moment_or_delay

    body = {"name": name, "role": role, "tenant": None if role == "admin" else tenant}
    if expires is not None:
        body["expires_at"] = moment_or_delay("--expires", expires).isoformat()
    answer = ask(context, "POST", "/v1/tokens", body)
    print_answer(answer, as_json, answer["token"])


@tokens.command("rm")
def remove_token(context: typer.Context, token_id: TokenId, as_json: AsJson = False) -> None:
    """Remove a token: it is no longer accepted."""
    print_answer(ask(context, "DELETE", f"/v1/tokens/{quote(token_id, safe='')}"), as_json, "removed")
