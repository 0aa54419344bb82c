"""Tokens: an admin makes and deletes them. A secret is shown once."""

import msgspec

from holdfast.api.auth import checked_name
from holdfast.api.request_types import CreatedToken, DeletedToken, NewToken, TokenList, TokenView
from holdfast.api.routing import Call, Reply, Routes
from holdfast.errors import Invalid
from holdfast.model import Role, Token
from holdfast.store.tokens import new_secret
from holdfast.submission import FIRST_YEAR, LAST_YEAR

routes = Routes()


@routes.add("GET", "/v1/tokens", role=Role.ADMIN, answers={200: TokenList})
async def list_tokens(call: Call) -> Reply:
    """List tokens, without their secrets."""
    return Reply(TokenList(items=[_view(token) for token in await call.store.tokens.list()]))


@routes.add("POST", "/v1/tokens", role=Role.ADMIN, answers={201: CreatedToken})
async def make_token(call: Call, body: NewToken) -> Reply:
    """Make a token; its secret is in this answer and nowhere else."""
    name = checked_name("name", body.name)
    if (body.tenant is None) != (body.role is Role.ADMIN):
        raise Invalid("tenant", "cannot be set for an admin, who acts in any tenant")
    if body.tenant is not None:
        checked_name("tenant", body.tenant)
    if body.expires_at is not None and not FIRST_YEAR <= body.expires_at.year <= LAST_YEAR:
        raise Invalid("expires_at", f"is not between the years {FIRST_YEAR} and {LAST_YEAR}")
    secret = new_secret()
    token = await call.store.tokens.add(
        name, body.role, secret=secret, tenant=body.tenant, by=call.who.actor, expires_at=body.expires_at
    )
    return Reply(CreatedToken(**msgspec.structs.asdict(token), token=secret), 201, {"Cache-Control": "no-store"})


@routes.add("DELETE", "/v1/tokens/{token_id}", role=Role.ADMIN, answers={200: DeletedToken})
async def remove_token(call: Call, token_id: str) -> Reply:
    """Delete a token. This server refuses it at once, others within two seconds."""
    await call.store.tokens.remove(token_id, by=call.who.actor)
    call.service.access.forget()
    return Reply(DeletedToken())


def _view(token: Token) -> TokenView:
    return TokenView(**msgspec.structs.asdict(token))
