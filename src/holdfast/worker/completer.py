"""Writes that many jobs share: finishes, starts and hand-overs, a few milliseconds of them in one statement."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from holdfast.errors import StoreError
from holdfast.model import HandOverReason, Lease, Outcome, Status
from holdfast.store import Store
from holdfast.store.outage import level_of
from holdfast.timing import backoff, jitter

log = logging.getLogger(__name__)

I = TypeVar("I")  # noqa: E741
A = TypeVar("A")

LINGER = 0.002
ENOUGH = 50
"""So many go without waiting for more: a whole claim of small functions ends in one turn of the loop."""
MOST = 500


class Gatherer(Generic[I, A]):
    """Collects items for a moment and writes them together; each caller gets the answer for its own.

    The database may be away: then it tries again, with longer and longer pauses, until it lands or nobody waits.
    """

    def __init__(self, write: Callable[[Sequence[I]], Awaitable[Sequence[A]]], *, linger: float = LINGER) -> None:
        self._write = write
        self._linger = linger
        self._waiting: list[tuple[I, Callable[[A | Exception], None]]] = []
        self._some = asyncio.Event()

    def put(self, item: I, answer: Callable[[A | Exception], None]) -> None:
        """Hand an item in; `answer` is called with what was written, or why it could not be."""
        self._waiting.append((item, answer))
        self._some.set()

    async def ask(self, item: I) -> A:
        """Hand an item in and wait for its answer."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()

        def answer(found: A | Exception) -> None:
            if future.done():
                return
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)

        self.put(item, answer)
        return await future

    async def run(self) -> None:
        """Write what comes, for ever. Two of these at once overlap their round trips."""
        while True:
            await self._some.wait()
            if self._linger and len(self._waiting) < ENOUGH:
                await asyncio.sleep(self._linger)
            batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            if not self._waiting:
                self._some.clear()
            if batch:
                await self._land([item for item, _ in batch], [answer for _, answer in batch])

    async def _land(self, items: Sequence[I], answers: Sequence[Callable[[A | Exception], None]]) -> None:
        n = 0
        while True:
            try:
                found = await self._write(items)
            except StoreError as error:
                n += 1
                log.log(level_of(error), "a write of %d waits for the database: %s", len(items), error)
                await asyncio.sleep(jitter(backoff(n, base=0.05, cap=2.0)))
            except Exception as error:
                if len(items) > 1:  # One of them cannot be written; the others can.
                    for item, answer in zip(items, answers, strict=True):
                        await self._land([item], [answer])
                else:
                    answers[0](error)
                return
            else:
                for answer, one in zip(answers, found, strict=True):
                    answer(one)
                return


Ending = tuple[Lease, Outcome]


def finishes(store: Store) -> Gatherer[Ending, Status | None]:
    """Ends of attempts. The answer is the job's status now, or None when the lease was lost."""

    async def write(ends: Sequence[Ending]) -> Sequence[Status | None]:
        answers = await store.leases.finish(ends)
        return [answers[lease.id] for lease, _ in ends]

    return Gatherer(write)


def starts(store: Store) -> Gatherer[Lease, bool]:
    """Phase `started`. The answer says whether the lease still held."""

    async def write(leases: Sequence[Lease]) -> Sequence[bool]:
        mine = await store.leases.start(leases)
        return [lease.id in mine for lease in leases]

    return Gatherer(write)


class Handed(msgspec.Struct, frozen=True):
    """A lease that is given back, and why; `worn` says that we failed at the job."""

    lease: Lease
    delay: float = 0.0
    worn: bool = False
    reason: HandOverReason = "leaving"


def hand_overs(store: Store) -> Gatherer[Handed, bool]:
    """Leases given back while the work goes on, to be adopted at once or after a delay."""

    async def write(items: Sequence[Handed]) -> Sequence[bool]:
        given: set[str] = set()
        for delay, worn, reason in {(item.delay, item.worn, item.reason) for item in items}:
            leases = [item.lease for item in items if (item.delay, item.worn, item.reason) == (delay, worn, reason)]
            given |= await store.leases.hand_over(leases, delay=delay, worn=worn, reason=reason)
        return [item.lease.id in given for item in items]

    return Gatherer(write)


async def retried(work: Callable[[], Awaitable[A]], what: str) -> A:
    """Do something in the store until the database answers."""
    n = 0
    while True:
        try:
            return await work()
        except StoreError as error:
            n += 1
            log.log(level_of(error), "%s waits for the database: %s", what, error)
            await asyncio.sleep(jitter(backoff(n, base=0.05, cap=2.0)))
