"""The databases that peers keep their jobs in: a Postgres of our own, SQLite files, a Redis of our own.

Each gives a peer a fresh place for every measurement, and a `Probe` to ask that place how far the jobs are.
"""

import asyncio
import contextlib
import itertools
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import asyncpg
from tests.support.cluster import Server
from tests.support.ports import free_port

from bench.installation import until
from bench.peers.environments import redis as redis_program
from bench.peers.old_transaction import OLD_TRANSACTION
from bench.peers.usage import server_cpu

NUMBERS = itertools.count()
OPEN_TRANSACTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    f" AND backend_type = 'client backend' AND state <> 'idle' AND application_name <> '{OLD_TRANSACTION}'"
)


class Probe(Protocol):
    """Asks the database; its own CPU time does not count."""

    async def number(self, query: str) -> int: ...

    async def free(self) -> bool:
        """Whether no worker holds a lock: one that is stopped inside a transaction would block the submit for ever."""

    async def settle(self) -> None:
        """Do the work that the submit left, statistics and a checkpoint, before the measurement."""

    def cpu(self) -> float:
        """CPU seconds of the database server so far."""


class PostgresProbe:
    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]", server: int) -> None:
        self.connection = connection
        self._server = server

    async def number(self, query: str) -> int:
        return int(await self.connection.fetchval(query) or 0)

    async def free(self) -> bool:
        return await self.number(OPEN_TRANSACTIONS) == 0

    async def settle(self) -> None:
        await self.connection.execute("ANALYZE")
        await self.connection.execute("CHECKPOINT")

    def cpu(self) -> float:
        return server_cpu(self._server, without=self.connection.get_server_pid())


class SqliteProbe:
    """A file; what SQLite costs is in the worker's own CPU time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def number(self, query: str) -> int:
        with contextlib.closing(sqlite3.connect(self.path, timeout=30)) as db:
            return int(db.execute(query).fetchone()[0] or 0)

    async def free(self) -> bool:
        with contextlib.closing(sqlite3.connect(self.path, timeout=0.1, isolation_level=None)) as db:
            try:
                db.execute("BEGIN IMMEDIATE")
                db.execute("ROLLBACK")
            except sqlite3.OperationalError:
                return False
            return True

    async def settle(self) -> None:
        pass

    def cpu(self) -> float:
        return 0.0


class RedisProbe:
    def __init__(self, port: int, server: int) -> None:
        self._port, self._server = port, server

    async def number(self, query: str) -> int:
        """`DATABASE COMMAND …`; the answer is an integer."""
        database, *command = query.split()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(f"SELECT {database}\r\n{' '.join(command)}\r\n".encode())
        await reader.readline()
        said = (await reader.readline()).decode()
        writer.close()
        return int(said[1:]) if said.startswith(":") else 0

    async def free(self) -> bool:
        return True

    async def settle(self) -> None:
        pass

    def cpu(self) -> float:
        return server_cpu(self._server)


class Postgres:
    """One cluster for all, with Postgres's own durability: fsync and synchronous_commit on."""

    def __init__(self) -> None:
        self.server = Server(settings=())
        self.server.start()

    @property
    def url(self) -> str:
        return self.server.url

    def database(self, name: str) -> str:
        return self.url.rsplit("/", 1)[0] + f"/{name}"

    async def _admin(self, statement: str) -> None:
        admin = await asyncpg.connect(self.url)
        try:
            await admin.execute(statement)
        finally:
            await admin.close()

    async def make(self, name: str, template: str = "template1") -> str:
        await self._admin(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.database(name)

    async def drop(self, name: str) -> None:
        await self._admin(f"DROP DATABASE {name} WITH (FORCE)")

    async def shown(self, setting: str) -> str:
        admin = await asyncpg.connect(self.url)
        try:
            return str(await admin.fetchval(f"SHOW {setting}"))
        finally:
            await admin.close()

    @contextlib.asynccontextmanager
    async def fresh(self, template: str) -> AsyncIterator[tuple[str, PostgresProbe]]:
        """A copy of a prepared database, dropped with the block."""
        name = f"bench_{next(NUMBERS)}"
        url = await self.make(name, template)
        connection = await asyncpg.connect(url)
        try:
            yield url, PostgresProbe(connection, self.server.pid)
        finally:
            await connection.close()
            await self.drop(name)


class Redis:
    """A Redis with the durability of the others: every write is in its log, and synced, before it is answered."""

    def __init__(self) -> None:
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-redis-"))
        options = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self._folder), "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "always", "daemonize": "no"}
        given = [part for name, value in options.items() for part in (f"--{name}", value)]
        self.process = subprocess.Popen([redis_program(), *given], stdout=subprocess.DEVNULL)

    async def ready(self) -> None:
        async def answers() -> bool:
            try:
                return await RedisProbe(self.port, 0).number("0 DBSIZE") == 0
            except OSError:
                return False

        await until("Redis", answers, within=10)

    @contextlib.asynccontextmanager
    async def fresh(self) -> AsyncIterator[tuple[str, RedisProbe]]:
        probe = RedisProbe(self.port, self.process.pid)
        await probe.number("0 FLUSHALL")
        yield f"redis://127.0.0.1:{self.port}", probe

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)


class Keepers:
    """All of them for one run."""

    def __init__(self) -> None:
        self.postgres = Postgres()
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-peers-"))
        self._redis: Redis | None = None

    async def redis(self) -> Redis:
        if self._redis is None:
            self._redis = Redis()
            await self._redis.ready()
        return self._redis

    def stop(self) -> None:
        self.postgres.server.remove()
        if self._redis is not None:
            self._redis.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def keepers() -> Iterator[Keepers]:
    made = Keepers()
    try:
        yield made
    finally:
        made.stop()
