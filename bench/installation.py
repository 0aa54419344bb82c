"""An installation to measure: a migrated database, a folder, and worker processes."""

import asyncio
import contextlib
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
from tests.support.cluster import cluster

from holdfast.store.migrate import migrate
from holdfast.store.postgres import PostgresDatabase
from holdfast.store.store import Store, connect, sqlite_path

ROOT = Path(__file__).parent.parent
HOLDFAST = Path(sys.executable).parent / "holdfast"


class TookTooLong(RuntimeError):
    pass


async def until(what: str, holds: Callable[[], Any], *, within: float = 120.0, look: float = 0.01) -> float:
    """Wait until something holds; return how long that took."""
    started = time.monotonic()
    while not (await found if asyncio.iscoroutine(found := holds()) else found):
        if time.monotonic() - started > within:
            raise TookTooLong(f"{what}: not within {within:g} seconds")
        await asyncio.sleep(look)
    return time.monotonic() - started


async def new_database(server: str, name: str) -> str:
    """Make a database on the server; return its URL."""
    admin = await asyncpg.connect(server)
    await admin.execute(f"CREATE DATABASE {name}")
    await admin.close()
    return server.rsplit("/", 1)[0] + f"/{name}"


@dataclass
class Installation:
    """One database with its workers."""

    kind: str
    url: str
    folder: Path
    store: Store

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        return {
            **kept,
            "HOLDFAST_DATABASE_URL": self.url,
            "HOLDFAST_DATA_DIR": str(self.folder),
            "HOLDFAST_PROCESS_USER": "root",
            **(more or {}),
        }

    @contextlib.contextmanager
    def worker(
        self, slots: int, *options: str, queue: str = "default", **settings: str
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """A worker process; ended with the block if it still runs. `settings` are those of the environment."""
        environment = self.environment({f"HOLDFAST_{name.upper()}": value for name, value in settings.items()})
        command = [str(HOLDFAST), "worker", "--app", "bench.functions:app", "--queue", f"{queue}:{slots}", *options]
        with (self.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            stop(process)

    async def submit(self, count: int, job: Mapping[str, Any]) -> list[str]:
        ids: list[str] = []
        for n in range(0, count, 10_000):
            ids += await self.store.jobs.submit_many([dict(job)] * min(10_000, count - n))
        return ids

    async def count(self, where: str) -> int:
        (row,) = await self.fetch(f"SELECT count(*) AS n FROM {self.table('jobs')} WHERE {where}")
        return int(row["n"])

    def table(self, name: str) -> str:
        return f"holdfast.{name}" if self.kind == "Postgres" else name

    async def fetch(self, sql: str) -> Sequence[Mapping[str, Any]]:
        if isinstance(self.store.database, PostgresDatabase):
            return await self.store.database.fetch(sql)
        with contextlib.closing(sqlite3.connect(sqlite_path(self.url))) as db:
            db.row_factory = sqlite3.Row
            return [dict(row) for row in db.execute(sql)]

    async def all_in(self, status: str, count: int, *, within: float = 120.0) -> float:
        """Wait until so many jobs have a status; return how long that took."""

        async def there() -> bool:
            return await self.count(f"status = '{status}'") >= count

        return await until(f"{count} jobs {status}", there, within=within, look=0.05)


@contextlib.asynccontextmanager
async def site(kind: str, url: str, folder: Path) -> AsyncIterator[Installation]:
    database = await connect(url, listen=True)
    await migrate(database)
    async with Store(database) as store:
        yield Installation(kind, url, folder, store)


@contextlib.asynccontextmanager
async def on_postgres(server: str, name: str) -> AsyncIterator[Installation]:
    """An installation on its own database."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        async with site("Postgres", await new_database(server, name), Path(folder)) as made:
            yield made


@contextlib.asynccontextmanager
async def on_sqlite() -> AsyncIterator[Installation]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        async with site("SQLite", f"sqlite:///{folder}/holdfast.db", Path(folder)) as made:
            yield made


@contextlib.asynccontextmanager
async def empty_databases(stores: Sequence[str]) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Give a function that makes a migrated database on SQLite or Postgres and returns its URL."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))
        server = stack.enter_context(cluster(settings=())) if "postgres" in stores else ""
        numbers = itertools.count()

        async def make(store: str) -> str:
            name = f"bench_{next(numbers)}"
            url = await new_database(server, name) if store == "postgres" else f"sqlite:///{folder}/{name}.db"
            database = await connect(url)
            await migrate(database)
            await database.close()
            return url

        yield make


def load() -> str:
    """How busy the machine is, in words: other work beside a measurement moves its figures."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"


def stop(process: "subprocess.Popen[bytes]", how: signal.Signals = signal.SIGTERM) -> None:
    """End a process that we started, politely at first."""
    if process.poll() is None:
        process.send_signal(how)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
