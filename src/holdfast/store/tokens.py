"""Tokens: who may call the service, with which role, in which tenant.

A secret is shown once, when it is made; the database keeps its SHA-256. Its 256 bits are random, so a slow hash would
buy nothing.
"""

import hashlib
import secrets
import uuid
from collections.abc import Sequence
from datetime import datetime

from holdfast.errors import Conflict, NotFound
from holdfast.model import Role, Token, new_id
from holdfast.store.database import Database, Row, Tx

PREFIX = "hf_"


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


class Tokens:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, secret: str) -> Token | None:
        """Whose secret this is; None if nobody's, or no more."""
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
        by: str | None = None,
        expires_at: datetime | None = None,
    ) -> Token:
        """Let whoever has this secret act in this role; a name stands in audit events, so it is given once."""
        rows = await self._database.rows(
            "add_token",
            id=new_id(),
            name=name,
            role=str(role),
            tenant=tenant,
            hash=digest(secret),
            created_by=by,
            until_at=expires_at,
        )
        if not rows:
            raise Conflict(f"name: a token {name} exists already; take another name, or delete that one first")
        return _to_token(rows[0])

    async def remove(self, token_id: str) -> str:
        """Take a token back and return its name. The last admin that never expires stays: nobody could make another."""
        try:
            known = str(uuid.UUID(token_id))
        except ValueError:
            raise NotFound("token", token_id[:60]) from None

        async def change(tx: Tx) -> str:
            admins = [row["id"] for row in await tx.rows("lasting_admins")]
            if admins == [known]:
                raise Conflict("this is the last admin token that does not expire; make another one first")
            gone = await tx.rows("remove_token", id=known)
            if not gone:
                raise NotFound("token", known)
            return str(gone[0]["name"])

        return await self._database.transact(change)

    async def use(self, token_ids: Sequence[str]) -> None:
        """Note that these were used now."""
        await self._database.rows("use_tokens", ids=list(token_ids))

    async def has_admin(self) -> bool:
        """Whether anybody could make further tokens."""
        tokens = await self.list()
        return any(token.role is Role.ADMIN and token.expires_at is None for token in tokens)


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
