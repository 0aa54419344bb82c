"""Tokens: who may call the service, with which role, in which tenant.

A secret is shown once, when it is made; the database stores its SHA-256. Its 256 bits are random, so a slow hash would
add no protection.
"""

import hashlib
import secrets
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime

from holdfast.errors import Conflict, NotFound
from holdfast.model import Actor, Role, Token, new_id
from holdfast.store.audit import By, name_of, record
from holdfast.store.database import Database, Row, Tx

PREFIX = "hf_"
SILENCE_DAYS = 30.0
"""The first use of a token after this many days without one is recorded in the audit trail, like its very first."""


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


class Tokens:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, secret: str) -> Token | None:
        """Return the token with this secret; None if there is none or it has expired."""
        rows = await self._database.read("find_token", hash=digest(secret))
        return _to_token(rows[0]) if rows else None

    async def list(self) -> Sequence[Token]:
        return [_to_token(row) for row in await self._database.read("list_tokens")]

    async def add(
        self,
        name: str,
        role: Role,
        *,
        secret: str,
        tenant: str | None = None,
        by: By = None,
        expires_at: datetime | None = None,
    ) -> Token:
        """Create a token with this secret and role. Names are unique, because audit events show them."""

        async def change(tx: Tx) -> Token:
            rows = await tx.rows(
                "add_token",
                id=new_id(),
                name=name,
                role=str(role),
                tenant=tenant,
                hash=digest(secret),
                created_by=name_of(by),
                until_at=expires_at,
            )
            if not rows:
                raise Conflict(f"name: a token {name} exists already; choose another name, or delete that token first")
            made = _to_token(rows[0])
            await record(tx, by, "token.make", made.id, tenant=tenant, after=_brief(made))
            return made

        return await self._database.transact(change)

    async def remove(self, token_id: str, *, by: By = None) -> str:
        """Delete a token and return its name. The last admin token that never expires cannot be deleted."""
        try:
            canonical_id = str(uuid.UUID(token_id))
        except ValueError:
            raise NotFound("token", token_id[:60]) from None

        async def change(tx: Tx) -> str:
            admins = [row["id"] for row in await tx.rows("permanent_admins")]
            if admins == [canonical_id]:
                raise Conflict("this is the last admin token that does not expire; make another one first")
            gone = await tx.rows("remove_token", id=canonical_id)
            if not gone:
                raise NotFound("token", canonical_id)
            token = _to_token(gone[0])
            await record(tx, by, "token.remove", token.id, tenant=token.tenant, before=_brief(token))
            return token.name

        return await self._database.transact(change)

    async def use(self, addresses: Mapping[str, str | None]) -> None:
        """Record that these tokens were used now; audit a first use, or one after a long time, with its address."""

        async def change(tx: Tx) -> None:
            rows = await tx.rows("lock_tokens", ids=list(addresses), silence=SILENCE_DAYS * 86_400)
            await tx.rows("use_tokens", ids=[row["id"] for row in rows])
            for row in rows:
                if row["silent"]:
                    token = _to_token(row)
                    used_at = None if token.used_at is None else token.used_at.isoformat()
                    await record(
                        tx,
                        Actor(name=token.name, token_id=token.id, role=token.role, address=addresses[token.id]),
                        "token.use",
                        token.id,
                        tenant=token.tenant,
                        before={"used_at": used_at},
                    )

        await self._database.transact(change)

    async def has_admin(self) -> bool:
        """Return whether an admin token exists that could make further tokens."""
        tokens = await self.list()
        return any(token.role is Role.ADMIN and token.expires_at is None for token in tokens)


def _brief(token: Token) -> dict[str, str | None]:
    expires_at = None if token.expires_at is None else token.expires_at.isoformat()
    return {"name": token.name, "role": str(token.role), "expires_at": expires_at}


def _to_token(row: Row) -> Token:
    return Token(
        id=row["id"],
        name=row["name"],
        role=Role(row["role"]),
        tenant=row["tenant"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        created_by=row["created_by"],
        used_at=row["used_at"],
    )
