"""Processes that run race scripts at the same moment, and transactions that are slow or pause on purpose."""

import asyncio
import multiprocessing
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from holdfast.store import Store, open_store
from holdfast.store.database import Tx
from holdfast.store.sqlite import SqliteDatabase
from holdfast.submission import Batch

T = TypeVar("T")


# The share of a slow process's transactions that are slow. With all of them slow, the others would only wait.
SLOW_SHARE = 0.1


@dataclass(frozen=True)
class Call:
    """One process's part in a race. `slow` is the longest delay before each statement of a transaction."""

    racer: Callable[..., Coroutine[Any, Any, Any]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    slow: float = 0.0
    listen: bool = False
    opens: bool = True


@dataclass(frozen=True)
class Report:
    value: Any
    deadlocks: int = 0
    gate_repairs: int = 0
    failure: str | None = None


class RaceProcesses:
    """Processes that wait for a race. A race that is late ends with all of them killed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._members: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def race(self, url: str, calls: Sequence[Call], *, seconds: float = 100.0) -> list[Report]:
        """Run each call in a process of its own, all at once; return their reports in order."""
        self._fill()
        assert len(calls) <= len(self._members)
        pipelines = [pipe for _, pipe in self._members[: len(calls)]]
        deadline = time.monotonic() + seconds
        try:
            for pipe, call in zip(pipelines, calls, strict=True):
                pipe.send((url, call))
            early = [_receive(pipe, deadline) for pipe in pipelines]
            began = time.monotonic()
            for pipe, answer in zip(pipelines, early, strict=True):
                if answer is None:
                    pipe.send(began)
            reports = [answer or _receive(pipe, deadline) for pipe, answer in zip(pipelines, early, strict=True)]
        except BaseException:
            self.close()
            raise
        failures = [report.failure for report in reports if report and report.failure]
        assert not failures, "\n".join(failures)
        return [report for report in reports if report is not None]

    def close(self) -> None:
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()
        self._members = []

    def _fill(self) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self._members) < self._size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_member, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))


def _receive(pipe: Connection, deadline: float) -> Report | None:
    assert pipe.poll(max(0.0, deadline - time.monotonic())), "a racer is late: it hangs, or the machine is too busy"
    answer: Report | None = pipe.recv()
    return answer


def _member(pipe: Connection) -> None:
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            url, call = pipe.recv()
            try:
                report = asyncio.run(_run(pipe, url, call))
            except Exception:
                report = Report(None, failure=f"{call.racer.__name__}: {traceback.format_exc()}")
            pipe.send(report)


async def _run(pipe: Connection, url: str, call: Call) -> Report:
    if not call.opens:
        pipe.send(None)
        return Report(await call.racer(url, **_timed(call.arguments, pipe.recv())))
    async with await open_store(url, listen=call.listen) as store:
        if call.slow:
            _slow_transactions(store, call.slow)
        pipe.send(None)
        value = await call.racer(store, **_timed(call.arguments, pipe.recv()))
    return Report(value, store.counters.deadlocks, store.counters.gate_repairs)


def _timed(arguments: Mapping[str, Any], began: float) -> Mapping[str, Any]:
    """Make the argument `start`, in seconds after the signal, a moment of the clock that all processes share."""
    return {**arguments, "start": began + arguments["start"]} if "start" in arguments else arguments


class _SlowTx:
    def __init__(self, tx: Tx, limit: float) -> None:
        self._tx = tx
        self._limit = limit

    async def rows(self, name: str, /, **parameters: Any) -> Sequence[Mapping[str, Any]]:
        # Reason: other processes commit between two statements of this transaction, which is what is under test.
        await asyncio.sleep(random.random() * self._limit)
        return await self._tx.rows(name, **parameters)

    async def values(self, name: str, kind: type[T], /, **parameters: Any) -> Sequence[T]:
        await asyncio.sleep(random.random() * self._limit)  # Reason: as above.
        return await self._tx.values(name, kind, **parameters)

    async def submit(self, batch: Batch) -> Sequence[Mapping[str, Any]]:
        return await self._tx.submit(batch)


def _slow_transactions(store: Store, limit: float) -> None:
    """Delay the statements of some transactions, so that others run in between. On SQLite nothing can."""
    if isinstance(store.database, SqliteDatabase):
        return
    transact = store.database.transact

    async def slowly(work: Callable[[Tx], Awaitable[T]]) -> T:
        if random.random() < SLOW_SHARE:
            return await transact(lambda tx: work(_SlowTx(tx, limit)))
        return await transact(work)

    setattr(store.database, "transact", slowly)  # noqa: B010


class Pause:
    """Stops one transaction of a Postgres store just before a named statement, until told to go on."""

    def __init__(self, store: Store, name: str) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self._name = name
        transact = store.database.transact

        async def pausing(work: Callable[[Tx], Awaitable[T]]) -> T:
            return await transact(lambda tx: work(_PausingTx(tx, self)))

        setattr(store.database, "transact", pausing)  # noqa: B010

    async def before(self, name: str) -> None:
        if name == self._name and not self.reached.is_set():
            self.reached.set()
            await self.go_on.wait()


class _PausingTx:
    def __init__(self, tx: Tx, pause: Pause) -> None:
        self._tx = tx
        self._pause = pause

    async def rows(self, name: str, /, **parameters: Any) -> Sequence[Mapping[str, Any]]:
        await self._pause.before(name)
        return await self._tx.rows(name, **parameters)

    async def values(self, name: str, kind: type[T], /, **parameters: Any) -> Sequence[T]:
        await self._pause.before(name)
        return await self._tx.values(name, kind, **parameters)

    async def submit(self, batch: Batch) -> Sequence[Mapping[str, Any]]:
        return await self._tx.submit(batch)
