"""SQLite's writer: operations that wait together share a commit, and fail alone."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from holdfast.errors import Conflict
from holdfast.model import new_id
from holdfast.permissions import tighten
from holdfast.store import open_store, sqlite
from holdfast.store.sqlite import SqliteDatabase
from tests.support.store_harness import TTL, StoreHarness

JOB = {"runner": "function", "spec": {"name": "f"}}


@pytest.fixture
def kind() -> str:
    return "sqlite"


async def test_operations_that_wait_together_share_a_commit_and_fail_alone(harness: StoreHarness) -> None:
    taken = (await harness.submit()).id
    calls = [harness.submit(id=taken if n % 3 == 0 else new_id(), lane="L" if n % 2 else None) for n in range(30)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, Conflict)]
    assert len(refused) == 10
    assert all(taken in str(error) for error in refused)
    assert len((await harness.store.jobs.list()).items) == 21


async def test_heartbeat_overtakes_waiting_writes(harness: StoreHarness) -> None:
    """Proves O6."""
    await harness.submit()
    (lease,) = await harness.claim()
    blocker = sqlite3.connect(harness.url.removeprefix("sqlite:///"), isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    order: list[str] = []

    async def note(name: str, call: "asyncio.Future[object]") -> None:
        await call
        order.append(name)

    async with asyncio.TaskGroup() as group:
        # Enough for two rounds of the writer: the first waits for the lock, the beat overtakes the second.
        for _ in range(80):
            group.create_task(note("submit", asyncio.ensure_future(harness.store.jobs.submit(JOB))))
        await asyncio.sleep(0)  # Twice, so that the submits are in the writer's queue before the heartbeat is.
        await asyncio.sleep(0)
        group.create_task(note("beat", asyncio.ensure_future(harness.store.leases.beat("w1", [lease], ttl=TTL))))
        await asyncio.sleep(0.05)  # Reason: let all of them reach the writer's queue.
        blocker.execute("ROLLBACK")
    blocker.close()
    assert order.index("beat") < 79


@pytest.mark.parametrize("name", ["store.db-wal", "store.db-shm"])
async def test_store_opens_while_another_process_removes_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The last process that closes the store removes its write-ahead log, at any moment of another one's start."""
    (tmp_path / name).touch()

    def removed_first(path: Path, mode: int) -> None:
        if path.name == name:
            path.unlink()
        tighten(path, mode)

    monkeypatch.setattr(sqlite, "tighten", removed_first)
    await SqliteDatabase(tmp_path / "store.db").close()


async def test_store_closes_after_the_writes_that_wait(harness: StoreHarness) -> None:
    store = await open_store(harness.url)
    blocker = sqlite3.connect(harness.url.removeprefix("sqlite:///"), isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    submits = [asyncio.ensure_future(store.jobs.submit(JOB)) for _ in range(3)]
    await asyncio.sleep(0.05)  # Reason: let them reach the writer's queue; the first is stuck at the lock.
    submits += [asyncio.ensure_future(store.jobs.submit(JOB)) for _ in range(3)]
    await asyncio.sleep(0.05)  # Reason: the same; these wait with the request to stop.
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0.05)  # Reason: the request to stop is in the queue, too.
    blocker.execute("ROLLBACK")
    blocker.close()
    async with asyncio.timeout(30):
        await closing
        await asyncio.gather(*submits)
    assert len((await harness.store.jobs.list()).items) == 6
