"""The scripts that the processes of test_races.py run.

Every racer opens its own store on the database under test; all of a race start on one signal. Sleeps in here never hide
a race: they aim several processes at one moment, or make a transaction slow so that more fits between its statements.
"""

import asyncio
import os
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import asyncpg

from holdfast.errors import Conflict, HoldfastError, IllegalMove, NotFound, StoreError
from holdfast.model import FUNCTION_DOMAIN, Cause, Claimable, Lease, NewEvent, Outcome, Status, StopPhase, new_id
from holdfast.store import Store
from holdfast.store.migrate import migrate
from holdfast.store.store import connect, sqlite_path

LONG = 60.0
UNTIL_SECONDS = 60.0
"""How long a process waits for what another one does, also on a busy machine."""
PAIR = Claimable(queue="default", capability="function:f", domain=FUNCTION_DOMAIN)
LIVE = (Status.PENDING, Status.QUEUED, Status.RUNNING)

# Reading the record without the store


async def select(url: str, sql: str) -> list[tuple[Any, ...]]:
    """Run one SELECT on either database."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(sqlite_path(url))
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()
    postgres = await asyncpg.connect(url, server_settings={"search_path": "holdfast"})
    try:
        return [
            tuple(str(v) if isinstance(v, asyncpg.pgproto.pgproto.UUID) else v for v in row.values())
            for row in await postgres.fetch(sql)
        ]
    finally:
        await postgres.close()


# Shared by the scripts


def function(**fields: Any) -> dict[str, Any]:
    return {"runner": "function", "spec": {"name": "f"}, **fields}


def worker_name() -> str:
    return f"w-{os.getpid()}-{new_id()[-6:]}"


async def claim(
    store: Store, worker: str, slots: int, *, ttl: float = LONG, adopting: bool = False
) -> tuple[Sequence[Lease], Sequence[Lease]]:
    """Adopted and claimed leases."""
    domains = [FUNCTION_DOMAIN] if adopting else []
    taken = await store.leases.claim(worker, [PAIR], slots=slots, ttl=ttl, domains=domains)
    return taken.adopted, taken.claimed


async def at(moment: float) -> None:
    """Wait for a moment of the clock that all processes of this machine share."""
    # Reason: the racers of a round aim at the same moment; nothing depends on their hitting it.
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


async def until(store: Store, job_id: str, reached: Callable[[Status], bool], *, ran: bool = False) -> None:
    """Wait for what another process does to a job; with `ran`, an attempt that has come and gone will do too."""
    deadline = time.monotonic() + UNTIL_SECONDS
    while time.monotonic() < deadline:
        job = await store.jobs.get(job_id)
        if reached(job.status) or (ran and job.attempt > 0):
            return
        await asyncio.sleep(0.005)  # Reason: polling what another process does.
    raise TimeoutError(f"job {job_id} did not get there")


async def anything_live(store: Store) -> bool:
    return bool((await store.jobs.list(status=LIVE, limit=1)).items)


@asynccontextmanager
async def announcing(flag: Path) -> AsyncIterator[None]:
    """Create a file when done, for workers that wait for more jobs."""
    try:
        yield
    finally:
        os.close(os.open(flag, os.O_CREAT | os.O_WRONLY))


def outcome_of(lease: Lease) -> Outcome:
    """What the job itself asks for: `ends` lists how its attempts end; the last one holds for all further ones."""
    ends: Sequence[str] = lease.inputs.get("ends", ["succeed"])
    match ends[min(lease.attempt, len(ends)) - 1]:
        case "succeed":
            return Outcome.succeeded({"attempt": lease.attempt})
        case "retry":
            return Outcome.requeued(Cause.EXIT)
        case "retry_later":
            return Outcome.requeued(Cause.EXIT, delay=0.002)
        case _:
            return Outcome.failed("exit_nonzero", "boom", exit_code=1)


# The scripts


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


async def submit_behind_each_other(store: Store, *, rounds: int, width: int, flag: Path) -> int:
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


async def finish_at_expiry(
    store: Store, *, ttl: float, width: int, flag: Path
) -> tuple[list[tuple[str, int, str, str | None]], int]:
    """Hold short leases and end them, often twice, about when they expire; some are renewed first.

    Returns (job, token, what the finisher wanted, answer) of every finish, and how many beats were answered `yours`.
    """
    answers: list[tuple[str, int, str, str | None]] = []
    renewed = 0

    async def end(lease: Lease, outcome: Outcome) -> None:
        answer = (await store.leases.finish([(lease, outcome)]))[lease.id]
        answers.append((lease.id, lease.token, str(outcome.status), answer))

    async def end_all(leases: Sequence[Lease]) -> None:
        ended = await store.leases.finish([(lease, Outcome.succeeded({"token": lease.token})) for lease in leases])
        answers.extend((lease.id, lease.token, "succeeded", ended[lease.id]) for lease in leases)

    async def hold(worker: str, lease: Lease, slack: float) -> None:
        nonlocal renewed
        expires = time.monotonic() + ttl
        if random.random() < 0.3:
            early = random.choice((slack, ttl))  # On a busy machine all that come at the edge come late.
            await at(expires + random.uniform(-early, slack))
            beats = (await store.leases.beat(worker, [lease], ttl=ttl)).jobs
            mine = any(beat.id == lease.id and beat.token == lease.token and beat.answer == "yours" for beat in beats)
            renewed += mine
            expires = time.monotonic() + (ttl if mine else 0)
        await at(expires + random.uniform(-slack, slack))
        ends = [end(lease, Outcome.succeeded({"token": lease.token, "by": "one"}))]
        if random.random() < 0.5:
            ends.append(end(lease, Outcome.failed("two", f"token {lease.token}")))
        await asyncio.gather(*ends)

    async def one() -> None:
        idle_since = time.monotonic()
        while time.monotonic() - idle_since < UNTIL_SECONDS / 2:
            worker = worker_name()
            adopted, claimed = await claim(store, worker, 1, ttl=ttl, adopting=True)
            if adopted or claimed:
                # Those that lost twice end in one statement, at once: else the reaper of a busy machine wins for ever.
                weary = [lease for lease in adopted if lease.adoption.adoptions > 1]
                fresh = [lease for lease in adopted if lease.adoption.adoptions < 2]
                await end_all(weary)
                await asyncio.gather(*(hold(worker, lease, 0.004) for lease in [*fresh, *claimed]))
                idle_since = time.monotonic()
            elif not await anything_live(store):
                return
            else:
                await asyncio.sleep(0.005)  # Reason: polling; others hold what is left.

    async with announcing(flag), asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(one())
    return answers, renewed


async def reap(store: Store, *, flags: Iterable[Path], patience: float = 60.0) -> list[tuple[str, int]]:
    """Reap again and again until all flags are there; return (job, attempt)."""
    flags, reaped = list(flags), []
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        over = all(flag.exists() for flag in flags)
        reaped += [(one.id, one.attempt) for one in await store.leases.reap(base=0.0, cap=0.0)]
        if over:
            break
        await asyncio.sleep(0.001)  # Reason: the others need the processor too.
    return reaped


async def beat_past_expiry(
    store: Store, *, jobs: int, ttl: float, around: tuple[float, float], flag: Path
) -> list[tuple[str, int, list[str]]]:
    """Claim, then beat again and again around the expiry until told `lost`, and thrice more; return all answers."""
    seen: list[tuple[str, int, list[str]]] = []

    async def one() -> None:
        worker = worker_name()
        _, leases = await claim(store, worker, 1, ttl=ttl)
        for lease in leases:
            answers: list[str] = []
            moment = time.monotonic()
            while answers[-4:] != ["lost"] * 4 and len(answers) < 200:
                moment = moment + ttl if answers[-1:] != ["lost"] else moment
                await at(moment + random.uniform(*around))
                pulse = await store.leases.beat(worker, [lease], ttl=ttl)
                moment = time.monotonic()
                answers += [beat.answer for beat in pulse.jobs]
            seen.append((lease.id, lease.token, answers))

    async with announcing(flag):
        for _ in range(jobs // 10):
            async with asyncio.TaskGroup() as group:
                for _ in range(10):
                    group.create_task(one())
    return seen


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


async def say_to_each(
    store: Store, *, verb: str, ids: Sequence[str], start: float, gap: float, flag: Path
) -> list[tuple[str, str, bool]]:
    """Say a verb to job n at moment n, when another process says another; return (job, verb, accepted)."""
    said: list[tuple[str, str, bool]] = []

    async def say(n: int, job_id: str) -> None:
        # Each at its own moment: a slow answer to one must not make this side late for all that follow.
        await at(start + n * gap + random.random() * 0.01)
        try:
            await getattr(store.jobs, verb)(job_id, by="racer")
        except IllegalMove:
            said.append((job_id, verb, False))
        else:
            said.append((job_id, verb, True))

    async with announcing(flag), asyncio.TaskGroup() as group:
        for n, job_id in enumerate(ids):
            group.create_task(say(n, job_id))
    return said


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


# Everything at once


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
        steps = [self.submit, self.take, self.take, self.end, self.end, self.end, self.say, self.say, self.steer]
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

    async def take(self) -> None:
        await self.store.gates.promote()
        adopted, claimed = await claim(self.store, self.worker, self.random.randint(1, 6), adopting=True)
        self.leases += [*adopted, *claimed]
        self.count("taken", len(adopted) + len(claimed))

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

    async def say(self) -> None:
        job_id = self.random.choice(await self.known() or [new_id()])
        jobs = self.store.jobs
        verbs: Sequence[Callable[..., Awaitable[object]]]
        verbs = [jobs.resume, jobs.resume, jobs.cancel, jobs.interrupt, jobs.release, jobs.resolve, jobs.dismiss]
        if self.random.random() < 0.1:
            await jobs.delete(job_id, force=True)
        else:
            await self.random.choice(verbs)(job_id, by="mix")
        self.count("said")

    async def steer(self) -> None:
        lane = f"lane-{self.random.randint(1, 6)}"
        if self.random.random() < 0.3:
            await self.store.lanes.pause(lane)
        else:
            await self.store.lanes.resume(lane)
        self.count("steered")


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
