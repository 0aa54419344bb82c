"""The scripts that the processes of a race run.

Every racer opens its own store on the database under test; all of a race start on one signal. Sleeps in here never hide
a race: they aim several processes at one moment, or make a transaction slow so that more fits between its statements.
"""

import asyncio
import os
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from holdfast.errors import Conflict, IllegalMove
from holdfast.model import FUNCTION_DOMAIN, Claimable, Lease, NewEvent, Status, StopPhase, new_id
from holdfast.store import Store
from holdfast.store.migrate import migrate
from holdfast.store.store import connect
from tests.support.race_steps import (
    LONG,
    UNTIL_SECONDS,
    announcing,
    anything_live,
    at,
    claim,
    function,
    outcome_of,
    until,
    worker_name,
)


async def work(
    store: Store,
    *,
    slots: int = 10,
    flags: Iterable[Path] = (),
    journal: Path | None = None,
    patience: float = UNTIL_SECONDS,
) -> list[tuple[str, int, int, str | None]]:
    """Claim and finish as the jobs ask for, until all flags are there and nothing is live, or nothing moves for long.

    Returns (job, token, attempt, answer) of every attempt.
    """
    worker, flags = worker_name(), list(flags)
    done: list[tuple[str, int, int, str | None]] = []
    moved = time.monotonic()
    while time.monotonic() - moved < patience:
        await store.gates.promote()
        _, leases = await claim(store, worker, random.randint(1, slots))
        if not leases:
            over = all(flag.exists() for flag in flags)
            if over and not await anything_live(store):
                break
            # Reason: polling; work comes from other processes, and the loop has a deadline.
            await asyncio.sleep(0.002)
            continue
        moved = time.monotonic()
        for group in _groups(leases):
            if journal is not None:
                await _hold(journal, group)
            answers = await store.leases.finish([(lease, outcome_of(lease)) for lease in group])
            done += [(lease.id, lease.token, lease.attempt, answers[lease.id]) for lease in group]
    return done


def _groups(leases: Sequence[Lease]) -> list[Sequence[Lease]]:
    """Some finishes end one job, some end many."""
    if random.random() < 0.5:
        return [leases]
    return [[lease] for lease in leases]


async def _hold(journal: Path, leases: Sequence[Lease]) -> None:
    """Write down, where the store has no hand in it, that these attempts run, for a moment."""
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        for what in ("start", "end"):
            for lease in leases:
                os.write(file, f"{time.monotonic_ns()} {what} {lease.lane} {lease.id}\n".encode())
            if what == "start":
                await asyncio.sleep(random.random() * 0.003)  # Reason: this is the work that must not overlap.
    finally:
        os.close(file)


async def submit_pairs_into_lanes(store: Store, *, rounds: int, width: int, flag: Path) -> int:
    """Submit a job into a new lane and, while it runs, another one; return how many lanes.

    A lane is never used again: the next submit would move a lane that hangs, and hide it.
    """
    done = 0

    async def one() -> None:
        nonlocal done
        while done < rounds:
            lanes = [f"lane-{new_id()}" for _ in range(3)]
            done += len(lanes)
            await store.jobs.submit_many([function(lane=lane) for lane in lanes])
            await asyncio.gather(*(store.jobs.submit_many([function(lane=lane)]) for lane in lanes))

    async with announcing(flag), asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(one())
    return done


async def submit_one_by_one(
    store: Store, *, lanes: Sequence[str], jobs: int, flag: Path | None = None
) -> list[tuple[str, str, bool]]:
    """Submit jobs one after the other; return (lane, job, runs twice) in the order of acceptance."""
    accepted = []
    for n in range(jobs):
        lane, twice = lanes[n % len(lanes)], n % 10 == 3
        job = function(lane=lane, inputs={"ends": ["retry", "succeed"]} if twice else {})
        (job_id,) = await store.jobs.submit_many([job])
        accepted.append((lane, job_id, twice))
    if flag is not None:
        os.close(os.open(flag, os.O_CREAT | os.O_WRONLY))
    return accepted


async def submit_needing(
    store: Store, *, rounds: int, bulk: int, flag: Path
) -> list[tuple[Literal["succeed", "fail", "diamond"], str, list[str]]]:
    """Submit parents, and at once the jobs that need them; return (how the parent ends, parent, dependants)."""
    made: list[tuple[Literal["succeed", "fail", "diamond"], str, list[str]]] = []

    async def refusable(parent: str) -> None:
        try:
            ids = await store.jobs.submit_many([function(needs=[parent])])
        except Conflict:
            ids = []  # The parent had failed already.
        made.append(("fail", parent, list(ids)))

    async with announcing(flag):
        while rounds > 0:
            size = min(rounds, bulk)
            rounds -= size
            how: Literal["succeed", "fail", "diamond"] = random.choice(["succeed", "succeed", "fail", "diamond"])
            end = "fail" if how == "fail" else "succeed"
            # With priority, so that they run now, whatever waits.
            batch = [function(inputs={"ends": [end]}, priority=10) for _ in range(size)]
            parents = await store.jobs.submit_many(batch)
            # Reason: sometimes the parents end before anybody needs them, sometimes after, mostly at the same time.
            pause = random.choice([0, 0, 0.005, 0.01, 0.05, None])
            if pause is None:
                await until(store, parents[0], lambda status: status.terminal)
            else:
                await asyncio.sleep(pause)
            if how == "fail":
                await asyncio.gather(*map(refusable, parents))
                continue
            for parent in parents if how == "diamond" else []:
                sides = [new_id(), new_id()]
                diamond = [*(function(id=side, needs=[parent]) for side in sides), function(needs=sides)]
                made.append((how, parent, list(await store.jobs.submit_many(diamond))))
            if how == "succeed":
                ids = await store.jobs.submit_many([function(needs=[parent]) for parent in parents])
                made += [(how, parent, [job_id]) for parent, job_id in zip(parents, ids, strict=True)]
    return made


async def resume_and_need(store: Store, *, rounds: int, width: int, flag: Path) -> list[str]:
    """Resume parents that failed once, and submit dependants while they run again; return the dependants."""
    dependants: list[str] = []

    async def one(parent: str) -> None:
        await until(store, parent, lambda status: status is Status.FAILED)
        await store.jobs.resume(parent)

    async def another(parent: str) -> None:
        while True:
            try:
                dependants.extend(await store.jobs.submit_many([function(needs=[parent])]))
            except Conflict:
                await asyncio.sleep(0.001)  # Reason: polling for the resume; bounded as above.
            else:
                return

    async with announcing(flag):
        for _ in range(rounds // width):
            ends = {"ends": ["fail", "succeed"]}
            parents = [new_id() for _ in range(width)]
            first = [new_id() for _ in parents]
            await store.jobs.submit_many(
                [
                    *(function(id=parent, inputs=ends) for parent in parents),
                    *(function(id=child, needs=[parent]) for child, parent in zip(first, parents, strict=True)),
                ]
            )
            dependants += first
            async with asyncio.timeout(2 * UNTIL_SECONDS), asyncio.TaskGroup() as group:
                for parent in parents:
                    group.create_task(one(parent))
                    group.create_task(another(parent))
    return dependants


async def stop_while_they_fail(
    store: Store, *, rounds: int, width: int, flag: Path
) -> list[tuple[str, str, str | None]]:
    """Submit jobs that fail and retry for ever, stop each in some moment of its life; return (job, verb, answer)."""
    stopped: list[tuple[str, str, str | None]] = []

    async def one(job_id: str) -> None:
        if random.random() < 0.5:
            await until(store, job_id, lambda status: status is Status.RUNNING, ran=True)
        await asyncio.sleep(random.random() * 0.04)  # Reason: any phase of its life will do.
        verb = random.choice(["cancel", "cancel", "cancel", "interrupt"])
        stop = store.jobs.cancel if verb == "cancel" else store.jobs.interrupt
        stopped.append((job_id, verb, (await stop(job_id)).outcome))

    async with announcing(flag):
        for _ in range(rounds // width):
            batch = [
                function(
                    max_attempts=1000,
                    inputs={"ends": [random.choice(["retry", "retry", "retry_later"])]},
                    **({"lane": f"lane-{n}"} if n % 3 == 0 else {}),
                )
                for n in range(width)
            ]
            ids = await store.jobs.submit_many(batch)
            await asyncio.gather(*map(one, ids))
            # The next ones go into the same lanes: a job that was interrupted would block them.
            for job_id, verb, _ in stopped[-width:]:
                if verb == "interrupt":
                    await _cancel_when_paused(store, job_id)
    return stopped


async def _cancel_when_paused(store: Store, job_id: str) -> None:
    await until(store, job_id, lambda status: status is not Status.RUNNING)
    with suppress(IllegalMove):
        await store.jobs.cancel(job_id)


async def call_on_each(
    store: Store, *, verb: str, ids: Sequence[str], start: float, gap: float, flag: Path
) -> list[tuple[str, str, bool]]:
    """Call a verb on job n at moment n, when another process calls another; return (job, verb, accepted)."""
    calls: list[tuple[str, str, bool]] = []

    async def call(n: int, job_id: str) -> None:
        # Each at its own moment: a slow answer to one must not make this side late for all that follow.
        await at(start + n * gap + random.random() * 0.01)
        try:
            await getattr(store.jobs, verb)(job_id, by="racer")
        except IllegalMove:
            calls.append((job_id, verb, False))
        else:
            calls.append((job_id, verb, True))

    async with announcing(flag), asyncio.TaskGroup() as group:
        for n, job_id in enumerate(ids):
            group.create_task(call(n, job_id))
    return calls


async def migrate_now(url: str, *, start: float) -> list[str]:
    """Migrate at one moment; return what this process applied."""
    await at(start)
    database = await connect(url, listen=False)
    try:
        return [migration.name for migration in await migrate(database)]
    finally:
        await database.close()


async def append_own(store: Store, *, batches: int) -> str:
    """Write batches of events to a job of this process's own; return the job."""
    (job_id,) = await store.jobs.submit_many([function(queue=worker_name())])
    queue = (await store.jobs.get(job_id)).queue
    pair = Claimable(queue=queue, capability="function:f", domain=FUNCTION_DOMAIN)
    (lease,) = (await store.leases.claim(worker_name(), [pair], slots=1, ttl=LONG)).claimed
    for n in range(1, batches + 1):
        await append(store, lease, n)
    return job_id


async def append(store: Store, lease: Lease, batch: int) -> str:
    """Append one batch of three events; offsets follow from its number."""
    lines = [NewEvent(type="log", data={"batch": batch, "line": n}) for n in range(3)]
    offsets, old = (batch * 3, 0), (batch * 3 - 3, 0)
    return (await store.events.append(lease, batch, lines, offsets=offsets, old_offsets=old)).answer


async def write_to_one(store: Store, *, lease: Lease, batches: int) -> tuple[int, int]:
    """Append to, stop and ladder the same job as seven others; return batches landed and steps written."""
    landed = steps = 0
    for batch in range(1, batches + 1):
        landed += await append(store, lease, batch) == "landed"
        steps += await store.leases.advance_stop(lease, StopPhase.SIGNALLED)
        if batch == batches // 3:
            await store.jobs.interrupt(lease.id, by=str(os.getpid()))
        if batch == batches // 2:
            await store.jobs.cancel(lease.id, by=str(os.getpid()))
    return landed, steps
