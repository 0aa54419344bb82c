"""A process that does everything at once, in random order, and one that finishes what is left."""

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from holdfast.errors import Conflict, HoldfastError, NotFound, StoreError
from holdfast.model import Cause, Lease, Outcome, Status, new_id
from holdfast.store import Store
from tests.support.race_steps import LIVE, LONG, anything_live, claim, function, worker_name


class Mix:
    """One process that does everything that callers and workers do, in random order."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.worker = worker_name()
        self.leases: list[Lease] = []
        self.done: dict[str, int] = {}

    async def run(self, seconds: float) -> dict[str, int]:
        deadline = time.monotonic() + seconds
        steps = [
            self.submit,
            self.claim,
            self.claim,
            self.end,
            self.end,
            self.end,
            self.call,
            self.call,
            self.change_lane,
        ]
        while time.monotonic() < deadline:
            step = self.random.choice(steps)
            try:
                await step()
            except StoreError:
                raise
            except (Conflict, NotFound) as refusal:
                self.count(type(refusal).__name__)
        while self.leases:
            await self.end()
        return self.done

    def count(self, what: str, n: int = 1) -> None:
        self.done[what] = self.done.get(what, 0) + n

    async def known(self) -> Sequence[str]:
        """Ids of recent jobs, of all processes."""
        return [job.id for job in (await self.store.jobs.list(limit=60)).items]

    async def submit(self) -> None:
        pick, known = self.random, await self.known()
        batch: list[dict[str, Any]] = []
        for _ in range(pick.randint(1, 10)):
            job = function(id=new_id(), max_attempts=pick.choice([1, 3]), hold=pick.random() < 0.1)
            if pick.random() < 0.6:
                job["lane"] = f"lane-{pick.randint(1, 6)}"
            candidates = [*pick.sample(known, min(len(known), 2)), *(other["id"] for other in batch[-2:])]
            if candidates and pick.random() < 0.4:
                job["needs"] = pick.sample(candidates, pick.randint(1, min(3, len(candidates))))
            batch.append(job)
        pick.shuffle(batch)  # Ids out of order: a lane's next job may have a lower id than its last.
        await self.store.jobs.submit_many(batch)
        self.count("submitted", len(batch))

    async def claim(self) -> None:
        await self.store.gates.promote()
        adopted, claimed = await claim(self.store, self.worker, self.random.randint(1, 6), adopting=True)
        self.leases += [*adopted, *claimed]
        self.count("claimed", len(adopted) + len(claimed))

    async def end(self) -> None:
        self.random.shuffle(self.leases)
        some, self.leases = self.leases[:4], self.leases[4:]
        if not some:
            return
        what = self.random.random()
        if what < 0.1:
            await self.store.leases.hand_over(some)
        elif what < 0.2:
            await self.store.leases.beat(self.worker, [*some, *self.leases], ttl=LONG)
            self.leases += some
        else:
            ends = [Outcome.succeeded()] * 4 + [Outcome.failed("boom", "boom"), Outcome.requeued(Cause.EXIT)]
            ends.append(Outcome.requeued(Cause.EXIT, delay=0.01))
            answers = await self.store.leases.finish([(lease, self.random.choice(ends)) for lease in some])
            self.count("finished", sum(answer is not None for answer in answers.values()))

    async def call(self) -> None:
        job_id = self.random.choice(await self.known() or [new_id()])
        jobs = self.store.jobs
        verbs: Sequence[Callable[..., Awaitable[object]]]
        verbs = [jobs.resume, jobs.resume, jobs.cancel, jobs.interrupt, jobs.release, jobs.resolve, jobs.dismiss]
        if self.random.random() < 0.1:
            await jobs.delete(job_id, force=True)
        else:
            await self.random.choice(verbs)(job_id, by="mix")
        self.count("called")

    async def change_lane(self) -> None:
        lane = f"lane-{self.random.randint(1, 6)}"
        if self.random.random() < 0.3:
            await self.store.lanes.pause(lane)
        else:
            await self.store.lanes.resume(lane)
        self.count("lanes_changed")


async def mix(store: Store, *, seconds: float, seed: int) -> dict[str, int]:
    return await Mix(store, seed).run(seconds)


async def drain(store: Store, *, seconds: float = 150.0) -> int:
    """Do what people and workers would do until every job has ended: free, release, resolve, run; return the rest."""
    worker = worker_name()
    for lane in await store.lanes.list(limit=1000):
        await store.lanes.resume(lane.lane)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for verb, statuses in (
            (store.jobs.release, [Status.PENDING]),
            (store.jobs.resolve, [Status.PAUSED, Status.FAILED, Status.TIMED_OUT]),
        ):
            for job in (await store.jobs.list(status=statuses, limit=1000)).items:
                if job.status is Status.PENDING or not job.dismissed:
                    with suppress(HoldfastError):
                        await verb(job.id)
        await store.gates.promote()
        adopted, claimed = await claim(store, worker, 100, adopting=True)
        if adopted or claimed:
            await store.leases.finish([(lease, Outcome.succeeded()) for lease in [*adopted, *claimed]])
        elif not await anything_live(store):
            break
    return len((await store.jobs.list(status=LIVE, limit=1000)).items)
