"""The interface of a dialect: named statements, transactions, and notifications to other processes.

Values are the same on every dialect: ids and JSON are text, names that end in `_at` are aware datetimes, lists and
mappings are sent as JSON. A table parameter is a list of mappings, or of structs with the columns as their fields.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields
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


def counter(help_text: str) -> Any:
    """Declare a counter, with the help text of its metric."""
    return field(default=0, metadata={"help": help_text})


@dataclass
class Counters:
    """Counters of what happened through this store. Deadlocks and repairs of gates should never happen."""

    claims: int = counter("Attempts claimed.")
    adoptions: int = counter("Attempts adopted from another worker.")
    losses: int = counter("Attempts that were lost.")
    leases_lost: int = counter("Finishes that came too late: another worker owned the job.")
    reaped: int = counter("Leases cleared because they had expired.")
    errors: int = counter("Operations that the database did not answer.")
    deadlocks: int = counter("Deadlocks, retried.")
    gate_repairs: int = counter("Gates found stuck and repaired: each is a bug.")
    finishes: Counter[str] = field(default_factory=Counter)
    """Ended attempts by the resulting status of their job."""
    duties: dict[str, float] = field(default_factory=dict)
    """When this process last ran each duty, in seconds since the epoch."""

    @classmethod
    def help_texts(cls) -> dict[str, str]:
        """Return the help text of each counter."""
        return {one.name: one.metadata["help"] for one in fields(cls) if "help" in one.metadata}

    def figures(self) -> dict[str, Any]:
        return {**vars(self), "finishes": dict(self.finishes), "duties": dict(self.duties)}


class Tx(Protocol):
    """Statements inside one transaction."""

    async def rows(self, name: str, /, **parameters: Any) -> Sequence[Row]: ...

    async def values(self, name: str, kind: type[T], /, **parameters: Any) -> Sequence[T]: ...

    async def submit(self, batch: Batch) -> Sequence[Row]: ...


class Database(Protocol):
    counters: Counters
    transaction_waits: bool
    """Whether the work of a transaction may await anything else than its statements."""

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

    async def submit_one(self, batch: Batch, *, topics: Sequence[str] | None = None) -> Row:
        """Accept a batch of one job and read it in the same transaction.

        Returns the job's record, `reused`, which says whether it existed already, and `asked` as in `submit`. With
        `topics`, other processes are notified of a new job with the commit: of its queue, and of these topics.
        """

    async def transact(self, work: Callable[[Tx], Awaitable[T]]) -> T:
        """Run several statements in one transaction; `work` may be called again after a deadlock."""

    async def announce(self, topics: Sequence[str]) -> None:
        """Notify other processes that something may have changed."""

    def hear(self) -> AbstractAsyncContextManager[AsyncIterator[Sequence[str]]]:
        """Receive the notifications of other processes."""

    async def close(self) -> None: ...
