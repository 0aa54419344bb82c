"""The store of a stateful test, emptied for each example, and how its answers compare with the reference model."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from holdfast.model import (
    Beat,
    Event,
    Job,
    Lease,
    Status,
    StopKind,
)
from holdfast.store import Store
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.store import connect
from holdfast.timing import ManualClock
from tests.support.reference_jobs import RefJob
from tests.support.store_harness import START, StoreHarness

T = TypeVar("T")
TABLES = ["jobs", "specs", "labels", "attempts", "events", "needs", "lanes", "queues", "workers", "leaders"]
RECORD = (
    *("status", "gate", "queue", "lane", "priority", "attempt", "attempts", "max_attempts", "requested_at"),
    *("available_at", "started_at", "finished_at", "updated_at", "lease", "orphaned_at", "dismissed", "result"),
    *("usage", "last_seq"),
)
GRANT = ("id", "token", "attempt", "domain", "lane")
PROGRESS = ("phase", "adoptions", "batch")


class ExampleStore:
    """A store on its own event loop, emptied for each example, with a manual clock."""

    def __init__(self, kind: str, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.clock = ManualClock(START)
        self.store = Store(self.run(connect(url, listen=False, connections=1, clock=self.clock)))
        self._harness = StoreHarness(kind, url, self.store, self.clock)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def clear(self) -> None:
        database = self.store.database
        if isinstance(database, PostgresDatabase):
            for table in TABLES:
                self.run(database.fetch(f"DELETE FROM holdfast.{table}"))
        else:
            self.run(database.migrate(lambda raw: [raw.execute(f"DELETE FROM {table}") for table in TABLES]))
        self.advance((START - self.clock.now()).total_seconds())

    def advance(self, seconds: float) -> None:
        self.run(self._harness.advance(seconds))

    def close(self) -> None:
        self.run(self.store.close())
        self._loop.close()


def seen(job: Job) -> dict[str, object]:
    """A job as the reference records it."""
    stop = stop_kind(job)
    return {
        **{name: getattr(job, name) for name in RECORD},
        "error": None if job.error is None else job.error.code,
        # What was carried out, or came too late, may stay on the record; what waits must be there.
        "stop": stop if job.status is Status.RUNNING or stop is StopKind.DELETE else None,
    }


def label(event: Event) -> str:
    """An event as the reference tells it."""
    return f"{event.type}:{event.data.get('action' if event.type == 'audit' else event.type, '')}"


def granted(lease: Lease) -> dict[str, object]:
    """What a lease says, as `grant` expects it."""
    progress = {name: getattr(lease.adoption, name) for name in PROGRESS}
    return {**{name: getattr(lease, name) for name in GRANT}, **progress, "stop": stop_kind(lease)}


def grant(job: RefJob) -> dict[str, object]:
    return {name: getattr(job, name) for name in (*GRANT, *PROGRESS, "stop")}


def stop_kind(of: Job | Lease | Beat) -> StopKind | None:
    request = of.adoption.stop_request if isinstance(of, Lease) else of.stop_request
    return None if request is None else request.kind


async def done(call: Awaitable[object]) -> None:
    """Await a call whose answer the next check looks at anyway."""
    await call
