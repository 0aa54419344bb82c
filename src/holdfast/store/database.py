"""The interface of a dialect: named statements, transactions, and notifications to other processes.

Values are the same on every dialect: ids and JSON are text, names that end in `_at` are aware datetimes, lists and
mappings are sent as JSON. A table parameter is a list of mappings, or of structs with the columns as their fields.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import msgspec

from holdfast.submission import Batch

Row = Mapping[str, Any]
T = TypeVar("T")

encode_json = msgspec.json.encode


def json_text(value: Any) -> str:
    return encode_json(value).decode()


def tuples(rows: Sequence[Any], columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the rows of a table parameter in column order; a key that a mapping lacks is None."""
    if rows and isinstance(rows[0], msgspec.Struct):
        return list(map(attrgetter(*columns), rows))
    return [tuple([row.get(column) for column in columns]) for row in rows]


@dataclass
class Counters:
    """Counters of what happened through this store. Deadlocks and repairs of gates should never happen."""

    deadlocks: int = 0
    gate_repairs: int = 0
    errors: int = 0
    claims: int = 0
    adoptions: int = 0
    losses: int = 0
    leases_lost: int = 0
    reaped: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    """Ended attempts by the resulting status of their job."""
    duties: dict[str, float] = field(default_factory=dict)
    """When this process last ran each duty, in seconds since the epoch."""

    def figures(self) -> dict[str, Any]:
        return {**vars(self), "finishes": dict(self.finishes), "duties": dict(self.duties)}


class Tx(Protocol):
    """Statements inside one transaction."""

    async def rows(self, name: str, /, **parameters: Any) -> Sequence[Row]: ...

    async def values(self, name: str, kind: type[T], /, **parameters: Any) -> Sequence[T]: ...

    async def submit(self, batch: Batch) -> Sequence[Row]: ...


class Database(Protocol):
    counters: Counters

    async def read(self, name: str, /, **parameters: Any) -> Sequence[Row]:
        """Run a statement that only reads."""

    async def read_long(self, name: str, /, **parameters: Any) -> Sequence[Row]:
        """Like `read`, for a statement that may take seconds: it does not block other reads of this process."""

    async def rows(self, name: str, /, *, urgent: bool = False, **parameters: Any) -> Sequence[Row]:
        """Run one statement in its own transaction; an urgent one goes before others of this process."""

    async def values(self, name: str, kind: type[T], /, **parameters: Any) -> Sequence[T]:
        """Like `rows`, for statements where each microsecond counts: a struct per row, its fields in column order."""

    async def submit(self, batch: Batch) -> Sequence[Row]:
        """Accept a batch, all or nothing; return (id, asked) for those of its jobs that exist already.

        `asked` is the id that was requested for the job, or None when the whole call is a repeat.
        """

    async def submit_one(self, batch: Batch) -> Row:
        """Accept a batch of one job and read it in the same transaction.

        Returns the job's record, `reused`, which says whether it existed already, and `asked` as in `submit`.
        """

    async def transact(self, work: Callable[[Tx], Awaitable[T]]) -> T:
        """Run several statements in one transaction; `work` may be called again after a deadlock."""

    async def announce(self, topics: Sequence[str]) -> None:
        """Notify other processes that something may have changed."""

    def hear(self) -> AbstractAsyncContextManager[AsyncIterator[Sequence[str]]]:
        """Receive the notifications of other processes."""

    async def close(self) -> None: ...
