"""Race scripts about leases: finish and beat around the expiry, while others reap."""

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.model import Lease, Outcome
from holdfast.store import Store
from tests.support.race_steps import (
    UNTIL_SECONDS,
    announcing,
    anything_live,
    at,
    claim,
    worker_name,
)


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

    async def finish_near_expiry(worker: str, lease: Lease, slack: float) -> None:
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
                await asyncio.gather(*(finish_near_expiry(worker, lease, 0.004) for lease in [*fresh, *claimed]))
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
