"""SQLite: one thread writes, one reads, and nothing else in this process touches the file.

WAL, `BEGIN IMMEDIATE`, synchronous=FULL. An operation is an ordinary coroutine that awaits only its own statements, so
the writer thread can run it from start to end without a pause; operations that wait at the same time share a commit.
`clock()` returns the same time throughout a transaction.
"""

import asyncio
import contextlib
import itertools
import queue
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import Conflict, Invalid, StoreError, StoreFull, StoreUnreachable
from holdfast.permissions import FILE, make_file, make_parents, tighten
from holdfast.store import queries, sqlite_reserve
from holdfast.store.database import Counters, Row, Tx
from holdfast.store.file_writes import FileWrites, watch_writes
from holdfast.store.sqlite_connection import Connection, try_wal
from holdfast.store.submit_sqlite import submit_batch
from holdfast.submission import Batch
from holdfast.timing import Clock, SystemClock

T = TypeVar("T")

LISTEN_SECONDS = 0.02
"""How often to look whether the file changed, without inotify."""
QUIET_SECONDS = 0.25
"""How often to look with inotify, in case it does not work on this filesystem."""
BURST = 4.0
"""Changes in a row that are reported at once; then one report every LISTEN_SECONDS."""
FIRST_LOOK_SECONDS = 0.0005
SYNC_SECONDS = 1.0
"""How long to look often after a write to the log: a commit is visible only once its writes are synced."""
GROUP = 64
DATA_ERRORS = ("integer overflow", "malformed JSON", "string or blob too big")
"""Errors about a value: the database is fine; a retry would fail again."""
_URGENT, _NORMAL, _LAST = 0, 1, 2


class SqliteTx:
    """Statements on the writer's connection, inside its open transaction."""

    def __init__(self, connection: Connection, named: Mapping[str, queries.NamedQuery]) -> None:
        self._connection = connection
        self._named = named

    async def rows(self, name: str, /, **parameters: Any) -> Sequence[Row]:
        return self._connection.run(self._named[name], parameters)

    async def values(self, name: str, kind: type[T], /, **parameters: Any) -> Sequence[T]:
        return self._connection.values(self._named[name], kind, parameters)

    async def submit(self, batch: Batch) -> Sequence[Row]:
        return submit_batch(lambda name, **values: self._connection.run(self._named[name], values), batch)


def _drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("an operation may await nothing but the statements of its transaction")


Work = Callable[[Connection], Any]


class _Request:
    """One piece of work for a thread, the precheck that decides whether it is needed, and the caller's future."""

    def __init__(self, work: Work, precheck: Work | None) -> None:
        self.work = work
        self.precheck = precheck
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def settle(self, answer: Any, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: no caller waits for this result.
            self._loop.call_soon_threadsafe(self._set, answer, error)

    def _set(self, answer: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(answer)
        else:
            self.future.set_exception(error)


class _Thread:
    """A thread that owns one connection and runs the requests it is given, urgent ones first."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Connection],
        run: Callable[[Connection, list[_Request]], None],
        counters: Counters,
    ) -> None:
        self._counters = counters
        self._queue: queue.PriorityQueue[tuple[int, int, _Request | None]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._connect = connect
        self._run = run
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    async def do(self, work: Callable[[Connection], T], *, precheck: Work | None = None, priority: int = _NORMAL) -> T:
        if self._closed.is_set():
            raise StoreUnreachable("the store is closed")
        request = _Request(work, precheck)
        self._queue.put((priority, next(self._count), request))
        if self._closed.is_set():  # The thread may have exited without reading the queue again.
            self._refuse_waiting("the store is closed")
        try:
            answer: T = await request.future
        except StoreError:
            self._counters.errors += 1
            raise
        return answer

    async def stop(self) -> None:
        self._queue.put((_LAST, next(self._count), None))
        await asyncio.to_thread(self._thread.join)

    def _loop(self) -> None:
        reason = "the store is closed"
        try:
            connection = self._connect()
            try:
                while requests := self._next():
                    self._run(connection, requests)
            finally:
                connection.raw.close()
        except sqlite3.Error as error:
            reason = f"SQLite: {error}"
        finally:
            self._closed.set()
            self._refuse_waiting(reason)

    def _refuse_waiting(self, reason: str) -> None:
        """Fail all requests that wait for a thread that has exited."""
        with contextlib.suppress(queue.Empty):
            while True:
                _, _, request = self._queue.get_nowait()
                if request is not None:
                    request.settle(None, StoreUnreachable(reason))

    def _next(self) -> list[_Request]:
        """Wait for a request and return it with all others that wait; an empty list means stop."""
        requests: list[_Request] = []
        block = True
        while len(requests) < GROUP:
            try:
                _, _, request = self._queue.get(block)
            except queue.Empty:
                break
            if request is None:
                if requests:
                    self._queue.put((_LAST, next(self._count), None))
                break
            requests.append(request)
            block = False
        return requests


def _read_each(connection: Connection, requests: list[_Request]) -> None:
    for request in requests:
        connection.tick()
        request.settle(*_attempt(lambda request=request: request.work(connection)))  # type: ignore[misc]


def _write_together(connection: Connection, requests: list[_Request]) -> None:
    """Run all waiting requests in one transaction, each in its own savepoint: one fsync for all of them.

    No caller gets a result before the commit; a request that fails rolls back only its own changes. A request
    whose precheck finds nothing to do takes no lock.
    """
    requests = [request for request in requests if _wanted(connection, request)]
    if not requests:
        return
    results: list[tuple[Any, BaseException | None]] = []

    def whole() -> None:
        connection.raw.execute("BEGIN IMMEDIATE")
        connection.tick()
        for request in requests:
            connection.raw.execute("SAVEPOINT request")
            results.append(_attempt(lambda request=request: request.work(connection)))  # type: ignore[misc]
            if results[-1][1] is not None:
                connection.raw.execute("ROLLBACK TO request")
            connection.raw.execute("RELEASE request")
        connection.raw.execute("COMMIT")

    _, error = _attempt(whole)
    if error is not None and connection.raw.in_transaction:
        _attempt(lambda: connection.raw.execute("ROLLBACK"))
    for n, request in enumerate(requests):
        request.settle(*((None, error) if error is not None else results[n]))


def _wanted(connection: Connection, request: _Request) -> bool:
    if request.precheck is None:
        return True
    precheck = request.precheck
    connection.tick()
    found, error = _attempt(lambda: precheck(connection))
    if error is not None or not found:
        request.settle([], error)
    return error is None and bool(found)


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Run work; return its result, or its error translated into holdfast's own."""
    try:
        return work(), None
    except sqlite3.IntegrityError as error:
        return None, Conflict(f"refused by the database: {error}")
    except sqlite3.DataError as error:
        return None, Invalid("data", f"SQLite cannot store it: {error}")
    except sqlite3.OperationalError as error:
        if any(text in str(error) for text in DATA_ERRORS):
            return None, Invalid("data", f"SQLite cannot store it: {error}")
        if sqlite_reserve.FULL in str(error):
            return None, StoreFull(f"SQLite: {error}")
        return None, StoreUnreachable(f"SQLite: {error}")
    except sqlite3.Error as error:
        return None, StoreError(f"SQLite: {error}")
    except BaseException as error:
        return None, error


class SqliteDatabase:
    """The SQLite dialect."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self.counters = Counters()
        self.transaction_waits = False
        self.path = path
        self._named = queries.load("sqlite")
        self._prepare(path)
        counters = self.counters
        self._writer = _Thread(
            "holdfast-writer", lambda: Connection(path, clock, writes=True), _write_together, counters
        )

        def new_reader(name: str) -> _Thread:
            return _Thread(name, lambda: Connection(path, clock, writes=False), _read_each, counters)

        self._new_reader = new_reader
        self._reader = self._new_reader("holdfast-reader")
        self._long_reader: _Thread | None = None

    @staticmethod
    def _prepare(path: Path) -> None:
        """Check in the caller's thread whether this file can be used."""
        try:
            make_parents(path)
            make_file(path)
            for file in (Path(f"{path}-wal"), Path(f"{path}-shm")):
                # SQLite makes them with the first one's mode, and removes them.
                with contextlib.suppress(FileNotFoundError):
                    tighten(file, FILE)
            try:
                try_wal(path)
            except sqlite3.OperationalError:
                if not sqlite_reserve.release_room(path):
                    raise
                try_wal(path)
        except (OSError, sqlite3.Error) as error:
            raise StoreUnreachable(f"cannot open the SQLite file {path}: {error}") from error

    async def read(self, name: str, /, **parameters: Any) -> Sequence[Row]:
        query = self._named[name]
        return await self._reader.do(lambda connection: connection.run(query, parameters))

    async def read_long(self, name: str, /, **parameters: Any) -> Sequence[Row]:
        query = self._named[name]
        if self._long_reader is None:
            self._long_reader = self._new_reader("holdfast-long-reader")
        return await self._long_reader.do(lambda connection: connection.run(query, parameters))

    async def rows(self, name: str, /, *, urgent: bool = False, **parameters: Any) -> Sequence[Row]:
        query = self._named[name]
        priority = _URGENT if urgent else _NORMAL
        precheck = self._precheck(query, parameters)
        return await self._writer.do(
            lambda connection: connection.run(query, parameters), precheck=precheck, priority=priority
        )

    async def values(self, name: str, kind: type[T], /, **parameters: Any) -> Sequence[T]:
        query = self._named[name]
        precheck = self._precheck(query, parameters)
        return await self._writer.do(lambda connection: connection.values(query, kind, parameters), precheck=precheck)

    @staticmethod
    def _precheck(query: queries.NamedQuery, parameters: Mapping[str, Any]) -> Work | None:
        return (lambda connection: connection.passes_precheck(query, parameters)) if query.has_precheck else None

    async def submit(self, batch: Batch) -> Sequence[Row]:
        return await self.transact(lambda tx: tx.submit(batch))

    async def submit_one(self, batch: Batch, *, topics: Sequence[str] | None = None) -> Row:
        async def both(tx: Tx) -> Row:
            existing = await tx.submit(batch)
            answer: Row = existing[0] if existing else {"id": batch.ids[0], "asked": batch.ids[0]}
            (row,) = await tx.rows("get_job", id=answer["id"], tenant=batch.tenant)
            return {**row, "reused": bool(existing), "asked": answer["asked"]}

        return await self.transact(both)

    async def transact(self, work: Callable[[Tx], Awaitable[T]]) -> T:
        async def whole(tx: Tx) -> T:
            return await work(tx)

        return await self._writer.do(lambda connection: _drive(whole(SqliteTx(connection, self._named))))

    async def migrate(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Pass the writing connection to the migrator, inside one transaction."""
        return await self._writer.do(lambda connection: work(connection.raw))

    async def make_room(self) -> None:
        """Reserve disk space that commits use when the disk is full (`sqlite_reserve`)."""
        await asyncio.to_thread(sqlite_reserve.set_blocks_aside, self.path)
        left = await self._reader.do(lambda connection: sqlite_reserve.free_pages(connection.raw))
        if left < sqlite_reserve.FEWEST_PAGES:
            await self._writer.do(lambda connection: sqlite_reserve.drop_pages(connection.raw))
            await self._writer.do(lambda connection: sqlite_reserve.add_pages(connection.raw))
            await self._writer.do(lambda connection: sqlite_reserve.drop_pages(connection.raw))

    async def announce(self, topics: Sequence[str]) -> None:
        """Send nothing: other processes see that the file changed."""

    @contextlib.asynccontextmanager
    async def hear(self) -> AsyncIterator[AsyncIterator[Sequence[str]]]:
        yield self._changes()

    async def _changes(self) -> AsyncIterator[Sequence[str]]:
        """Report that another connection changed the file: soon after a write to its log, else by polling.

        A few changes are reported at once each; while they keep coming, they are reported together.
        """
        seen = await self._reader.do(_data_version)
        credit, at = BURST, time.monotonic()
        with watch_writes(Path(f"{self.path}-wal")) as writes:
            while True:
                version = await self._version_after(seen, writes)
                if version == seen:
                    continue
                seen = version
                yield ("*",)
                now = time.monotonic()
                credit, at = min(BURST, credit + (now - at) / LISTEN_SECONDS) - 1, now
                if credit < 0:
                    await asyncio.sleep(LISTEN_SECONDS)

    async def _version_after(self, seen: int, writes: FileWrites | None) -> int:
        """Wait for a sign of a change, and return the version of the file then."""
        if writes is None:
            await asyncio.sleep(LISTEN_SECONDS)
        elif await writes.wait(QUIET_SECONDS):
            pause = FIRST_LOOK_SECONDS
            until = time.monotonic() + SYNC_SECONDS
            while time.monotonic() < until:
                await asyncio.sleep(pause)
                if (version := await self._reader.do(_data_version)) != seen:
                    return version
                pause = min(1.5 * pause, LISTEN_SECONDS)
        return await self._reader.do(_data_version)

    async def close(self) -> None:
        await self._writer.stop()
        await self._reader.stop()
        if self._long_reader is not None:
            await self._long_reader.stop()


def _data_version(connection: Connection) -> int:
    return int(connection.raw.execute("PRAGMA data_version").fetchone()[0])
