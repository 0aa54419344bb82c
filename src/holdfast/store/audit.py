"""The audit trail: who changed tokens, tools, limits, queues, lanes, workers, and jobs on an operator's request.

`record` adds a row in the transaction of the change that it reports, so neither exists without the other. A row
holds names, numbers and brief states; never a secret, a result, or the arguments of a command. What happened to one
job is in that job's own history, which is deleted with it.
"""

import base64
import binascii
import functools
import os
import pwd
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from holdfast.errors import Invalid, one_line
from holdfast.model import Actor, AuditEntry, Role
from holdfast.store.database import Database, Row, Tx
from holdfast.store.rows import to_json
from holdfast.timing import from_micros, to_micros

By = Actor | str | None
"""Who makes a change: a caller of the service, a person at the command line, or a name from an embedding program."""
MAX_TEXT = 500
PRUNED = 5000


class AuditPage(msgspec.Struct, frozen=True, kw_only=True):
    items: Sequence[AuditEntry]
    next_cursor: str | None


@functools.cache
def local_actor(kind: Literal["cli", "server", "embedded"]) -> Actor:
    """Return the account that this process runs as, for changes made without an API token."""
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return Actor(name=f"{kind}:{user}@{socket.gethostname()}")


def name_of(by: By) -> str | None:
    """Return the actor's name for a job's own history."""
    return by.name if isinstance(by, Actor) else by


async def record(
    tx: Tx | Database,
    by: By,
    action: str,
    subject: str,
    *,
    tenant: str | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    reason: str | None = None,
) -> None:
    """Add one row. `tenant` is the owner of the subject; None if the subject belongs to the installation."""
    actor = _actor_of(by)
    await tx.rows(
        "add_audit",
        actor=one_line(actor.name, MAX_TEXT),
        token_id=actor.token_id,
        role=None if actor.role is None else str(actor.role),
        address=actor.address,
        tenant=tenant,
        action=action,
        subject=one_line(subject, MAX_TEXT),
        before=None if before is None else dict(before),
        after=None if after is None else dict(after),
        reason=one_line(reason, MAX_TEXT) if reason else None,
    )


def _actor_of(by: By) -> Actor:
    if isinstance(by, Actor):
        return by
    return local_actor("embedded") if by is None else Actor(name=f"embedded:{by}")


class Audit:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(
        self,
        *,
        who: str | None = None,
        what: str | None = None,
        since: datetime | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> AuditPage:
        """Return one page, newest first.

        `who` is a name or a token's id; `what` an action, such as `token.remove`, or its first word.
        """
        if not 1 <= limit <= 1000:
            raise Invalid("limit", f"{limit} is not between 1 and 1000")
        if since is not None and since.tzinfo is None:
            raise Invalid("since", "has no time zone")
        before_at, before_id = _read_cursor(cursor)
        rows = await self._database.read_long(
            "list_audit",
            who=who,
            what=what,
            since_at=since,
            before_at=before_at,
            before_id=before_id,
            limit=limit + 1,
        )
        items = [_to_entry(row) for row in rows[:limit]]
        return AuditPage(items=items, next_cursor=_cursor(items[-1]) if len(rows) > limit else None)

    async def add(
        self, by: By, action: str, subject: str, *, after: Mapping[str, Any] | None = None, reason: str | None = None
    ) -> None:
        """Record an action that changes nothing in the database itself, or whose changes follow in many steps."""
        await record(self._database, by, action, subject, after=after, reason=reason)

    async def tools_loaded(self, by: By, path: str, tools: Mapping[str, str]) -> bool:
        """Record which tools changed since a server last loaded them; `tools` maps names to digests."""

        async def change(tx: Tx) -> bool:
            await tx.rows("lock_tools")
            recorded = _tools_in(await tx.rows("last_of_action", action="tools.change"))
            if recorded == tools:
                return False
            differing = {
                "added": sorted(tools.keys() - recorded.keys()),
                "changed": sorted(name for name in tools.keys() & recorded.keys() if tools[name] != recorded[name]),
                "removed": sorted(recorded.keys() - tools.keys()),
            }
            await record(tx, by, "tools.change", path, after={**differing, "tools": dict(tools)})
            return True

        if _tools_in(await self._database.read("last_of_action", action="tools.change")) == tools:
            return False
        return await self._database.transact(change)

    async def prune(self, age: float, limit: int = PRUNED) -> int:
        """Remove rows that are older than `age` seconds, the oldest first and at most `limit`; return how many."""
        return len(await self._database.rows("prune_audit", age=age, limit=limit))


def _tools_in(rows: Sequence[Row]) -> Mapping[str, str]:
    found: Any = to_json(rows[0]["after"]) if rows else None
    return {} if found is None else dict(found["tools"])


def _to_entry(row: Row) -> AuditEntry:
    return AuditEntry(
        id=row["id"],
        done_at=row["done_at"],
        actor=row["actor"],
        token_id=row["token_id"],
        role=None if row["role"] is None else Role(row["role"]),
        address=row["address"],
        tenant=row["tenant"],
        action=row["action"],
        subject=row["subject"],
        before=to_json(row["before"]),
        after=to_json(row["after"]),
        reason=row["reason"],
    )


def _cursor(entry: AuditEntry) -> str:
    return base64.urlsafe_b64encode(f"{to_micros(entry.done_at)}.{entry.id}".encode()).decode()


def _read_cursor(cursor: str | None) -> tuple[datetime | None, int | None]:
    if cursor is None:
        return None, None
    try:
        micros, _, entry = base64.urlsafe_b64decode(cursor.encode()).decode().partition(".")
        return from_micros(int(micros)), _bounded(int(entry))
    except (ValueError, binascii.Error, OverflowError):
        raise Invalid("cursor", "is not a valid cursor") from None


def _bounded(number: int) -> int:
    if not 0 <= number < 2**63:
        raise ValueError("is not the id of a row")
    return number
