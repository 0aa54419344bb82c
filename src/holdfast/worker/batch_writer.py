"""Batched writes: finishes, starts and hand-overs of a few milliseconds go to the database in one statement."""

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
"""A batch of this size is written without lingering: a whole claim of small functions ends in one loop iteration."""
MOST = 500


class BatchWriter(Generic[I, A]):
    """Collects items for a moment and writes them together; each caller gets the answer for its own item.

    While the database is unavailable, a batch is retried with backoff until it is written.
    """

    def __init__(self, write: Callable[[Sequence[I]], Awaitable[Sequence[A]]], *, linger: float = LINGER) -> None:
        self._write = write
        self._linger = linger
        self._waiting: list[tuple[I, Callable[[A | Exception], None]]] = []
        self._some = asyncio.Event()

    def put(self, item: I, answer: Callable[[A | Exception], None]) -> None:
        """Queue an item. `answer` is called with the result of the write, or with the error."""
        self._waiting.append((item, answer))
        self._some.set()

    async def ask(self, item: I) -> A:
        """Queue an item and wait for its answer."""
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
        """Write batches forever. Two concurrent runs overlap their round trips."""
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
                log.log(level_of(error), "write of %d items failed, retrying: %s", len(items), error)
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


Finish = tuple[Lease, Outcome]


def finishes(store: Store) -> BatchWriter[Finish, Status | None]:
    """Batch the ends of attempts. The answer is the job's new status, or None if the lease was lost."""

    async def write(ends: Sequence[Finish]) -> Sequence[Status | None]:
        answers = await store.leases.finish(ends)
        return [answers[lease.id] for lease, _ in ends]

    return BatchWriter(write)


def starts(store: Store) -> BatchWriter[Lease, bool]:
    """Batch the writes of phase `started`. The answer is whether the lease was still ours."""

    async def write(leases: Sequence[Lease]) -> Sequence[bool]:
        mine = await store.leases.start(leases)
        return [lease.id in mine for lease in leases]

    return BatchWriter(write)


class HandOverRequest(msgspec.Struct, frozen=True):
    """A lease to hand over, and why. `failed`: this worker failed with the attempt, and such adoptions are counted."""

    lease: Lease
    delay: float = 0.0
    failed: bool = False
    reason: HandOverReason = "leaving"


def hand_overs(store: Store) -> BatchWriter[HandOverRequest, bool]:
    """Batch the hand-overs of leases whose attempts keep running, to be adopted immediately or after a delay."""

    async def write(items: Sequence[HandOverRequest]) -> Sequence[bool]:
        given: set[str] = set()
        for delay, failed, reason in {(item.delay, item.failed, item.reason) for item in items}:
            leases = [item.lease for item in items if (item.delay, item.failed, item.reason) == (delay, failed, reason)]
            given |= await store.leases.hand_over(leases, delay=delay, adoption_failed=failed, reason=reason)
        return [item.lease.id in given for item in items]

    return BatchWriter(write)


async def with_retries(work: Callable[[], Awaitable[A]], what: str) -> A:
    """Repeat a store operation until the database answers. `what` names it in the log, as a gerund."""
    n = 0
    while True:
        try:
            return await work()
        except StoreError as error:
            n += 1
            log.log(level_of(error), "%s failed, retrying: %s", what, error)
            await asyncio.sleep(jitter(backoff(n, base=0.05, cap=2.0)))
