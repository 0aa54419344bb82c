"""A store: one database, and the parts through which callers and workers use it."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from holdfast.config import Pooler
from holdfast.errors import Invalid
from holdfast.store.audit import Audit
from holdfast.store.database import Counters
from holdfast.store.direct_jobs import DirectJobs
from holdfast.store.events import Events
from holdfast.store.explain import Explain
from holdfast.store.files import Files
from holdfast.store.gates import Gates
from holdfast.store.jobs import Jobs
from holdfast.store.lanes import Lanes
from holdfast.store.leases import Leases
from holdfast.store.migrate import require_current
from holdfast.store.notify import Notifications
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.queues import Queues
from holdfast.store.retention import Pruning
from holdfast.store.shared_folder import SharedFolderRecord
from holdfast.store.snapshots import Snapshots
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.tasks import Tasks
from holdfast.store.tokens import Tokens
from holdfast.store.workers import Attempts, Workers
from holdfast.timing import Clock


class Store:
    def __init__(
        self, database: SqliteDatabase | PostgresDatabase, *, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.database = database
        self.notifications = Notifications(database)
        self.lanes = Lanes(database, self.notifications)
        self.gates = Gates(database, self.lanes, self.notifications)
        self.jobs = Jobs(database, self.gates, self.notifications, defaults)
        self.direct_jobs = DirectJobs(database, self.jobs)
        self.queues = Queues(database, self.notifications)
        self.leases = Leases(database, self.gates, self.queues, self.notifications)
        self.events = Events(database)
        self.attempts = Attempts(database)
        self.pruning = Pruning(database)
        self.shared_folder = SharedFolderRecord(database)
        self.audit = Audit(database)
        self.tokens = Tokens(database)
        self.snapshots = Snapshots(database)
        self.tasks = Tasks(database)
        self.workers = Workers(database, self.leases)
        self.explain = Explain(database, self.jobs, self.lanes, self.queues, self.workers, self.tasks)

    def delete_with(self, files: Files) -> None:
        """Remove the files of jobs that are deleted or pruned from now on."""
        self.jobs.files = files
        self.pruning.files = files

    @property
    def counters(self) -> Counters:
        return self.database.counters

    async def installation(self) -> str:
        """Return the random id of this database, made by its first migration: part of the identity of every attempt."""
        (row,) = await self.database.read("installation")
        return str(row["id"])

    async def test_write(self) -> None:
        """Raise a StoreError unless the database accepts a write."""
        await self.database.rows("test_write")

    async def make_room(self) -> None:
        """Reserve disk space for commits on a full disk; does nothing on Postgres, whose server does that itself."""
        if isinstance(self.database, SqliteDatabase):
            await self.database.make_room()

    async def next_due(self) -> float | None:
        """Return the seconds until the next delayed job is due, by the database's clock; None if there is none."""
        rows = await self.database.read("next_due")
        return max(0.0, float(rows[0]["wait"])) if rows else None

    async def close(self) -> None:
        await self.notifications.close()
        await self.database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def connect(
    url: str,
    *,
    schema: str = "holdfast",
    connections: int = 4,
    listen: bool = True,
    listen_url: str | None = None,
    pooler: Pooler = "none",
    answer_within: float | None = None,
    clock: Clock | None = None,
) -> SqliteDatabase | PostgresDatabase:
    """Connect to a database, migrated or not. `clock` is for SQLite, whose clock is this host's."""
    scheme = urlsplit(url).scheme
    if scheme == "sqlite":
        return SqliteDatabase(sqlite_path(url), clock)
    if scheme in ("postgres", "postgresql"):
        return await PostgresDatabase.connect(
            url,
            schema=schema,
            connections=connections,
            listen=listen,
            listen_url=listen_url,
            pooler=pooler,
            answer_within=answer_within,
        )
    raise Invalid("database_url", f"starts with {scheme or 'nothing'!r}: use sqlite:///path or postgresql://host/name")


async def open_store(
    url: str,
    *,
    schema: str = "holdfast",
    connections: int = 4,
    listen: bool = True,
    listen_url: str | None = None,
    pooler: Pooler = "none",
    answer_within: float | None = None,
    clock: Clock | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Store:
    """Open a migrated store. `defaults` fill in fields that jobs submitted through it leave out."""
    database = await connect(
        url,
        schema=schema,
        connections=connections,
        listen=listen,
        listen_url=listen_url,
        pooler=pooler,
        answer_within=answer_within,
        clock=clock,
    )
    try:
        await require_current(database)
    except BaseException:
        await database.close()
        raise
    return Store(database, defaults=defaults)


def sqlite_path(url: str) -> Path:
    """Return the file of `sqlite:///relative` or `sqlite:////absolute`."""
    rest = url.removeprefix("sqlite://")
    if not rest.startswith("/") or len(rest) < 2:
        raise Invalid("database_url", f"{url!r} names no file: use sqlite:///path")
    return Path(unquote(rest[1:]))
