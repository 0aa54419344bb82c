"""The cost of a heartbeat: one statement for all jobs of a worker."""

import asyncio
import threading
from typing import Any

import pytest

from holdfast.runner.function import Context
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.sqlite import SqliteDatabase
from tests.support.in_process_workers import InProcessWorkers, eventually

JOBS = 20


class Asked:
    """What the heartbeat's thread asks of a database: the names of statements, and for how many leases."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.statements: list[tuple[str, int]] = []
        for database in (PostgresDatabase, SqliteDatabase):
            for method in ("rows", "values", "read", "transact"):
                self._note(monkeypatch, database, method)

    def _note(self, monkeypatch: pytest.MonkeyPatch, database: type, method: str) -> None:
        ask = getattr(database, method)

        async def noted(self_: object, what: Any, *args: Any, **parameters: Any) -> Any:
            if threading.current_thread().name == "holdfast-heart":
                name = what if isinstance(what, str) else method
                self.statements.append((name, len(parameters.get("rows", ()))))
            return await ask(self_, what, *args, **parameters)

        monkeypatch.setattr(database, method, noted)


async def test_one_statement_renews_all_leases_of_a_worker(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves L5: a heartbeat is one statement, however many jobs the worker has."""
    workers.set(heartbeat_interval=0.2)
    asked = Asked(monkeypatch)
    done = asyncio.Event()

    @workers.functions.add
    async def wait(ctx: Context) -> None:
        await done.wait()

    jobs = [await workers.submit("wait") for _ in range(JOBS)]
    async with workers.worker({"default": JOBS}):
        for job in jobs:
            await workers.running(job)
        asked.statements.clear()

        async def beaten() -> list[tuple[str, int]] | None:
            whole = asked.statements[1:]  # The first may have begun while the last was claimed.
            return list(whole) if len(whole) >= 5 else None

        assert set(await eventually(beaten, "it beats")) == {("beat", JOBS)}
        done.set()
        for job in jobs:
            await workers.ended(job)
