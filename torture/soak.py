"""`python -m torture.soak --hours 0.5`: half of the load that this machine carries, for long, without faults.

The load goes over HTTP to both servers (load.py), and followers read the streams of both. Memory and open files of
every process, connections, rows and sizes of every table are sampled (gauges.py), and drawn as a picture. Ended jobs
are pruned from early on, so that what should be flat can be flat; now and then the load pauses, and all that was
submitted has to end. The last quarter of the time is held against the second: what grew makes the exit code 1.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.duties.pruner import Pruner
from holdfast.model import TERMINAL
from holdfast.store import Store, open_store
from holdfast.store.retention import Retention
from torture import gauges
from torture.clients import follow_on
from torture.final_state import fetch
from torture.history import Follow, History
from torture.installation import SERVERS, TTL, Installation
from torture.load import BULK, Caller
from torture.plot import svg
from torture.run import running_installation
from torture.samples import FAILED, Drift, Samples

MEASURE_SECONDS = 20.0
BACKLOG = 300
FOLLOWERS = 4
SETTLE_SECONDS = 60.0
ENDED = "SELECT count(*) AS n FROM {schema}jobs WHERE status = 'succeeded'"
AGE_KEYS = """
UPDATE {{schema}}idempotency SET made_at = made_at - {day} WHERE made_at <= {now} - {keep} AND made_at > {now} - {day}
"""


@dataclass(frozen=True)
class SoakPlan:
    """How a soak of so many seconds goes."""

    seconds: float

    @property
    def every(self) -> float:
        """Seconds between two samples."""
        return max(1.0, self.seconds / 180)

    @property
    def keep(self) -> float:
        """Seconds for which ended jobs are kept: retention acts well within the first fifth."""
        return self.seconds / 15

    @property
    def vacuum(self) -> int:
        """Seconds between two looks of autovacuum: a minute, as Postgres has it, or less in a short soak."""
        return max(2, min(60, int(self.seconds / 30)))

    def pauses(self, at: float) -> bool:
        """Whether nothing is submitted at this time: the last tenth of each twelfth."""
        return at % (self.seconds / 12) > 0.9 * self.seconds / 12


async def capacity(installation: Installation, caller: Caller) -> float:
    """Jobs per second when there is always a backlog; submitted over HTTP too, as the load that is measured by it."""
    began = time.monotonic()
    while time.monotonic() - began < MEASURE_SECONDS:
        if await gauges.live(installation.url) < BACKLOG:
            await asyncio.gather(*(caller.submit(BULK) for _ in range(BACKLOG // BULK)))
        await asyncio.sleep(0.1)
    ((row,),) = await fetch(installation.url, ENDED)
    return float(row["n"] / (time.monotonic() - began))


async def load(caller: Caller, rate: float, plan: SoakPlan) -> None:
    """Submit at a steady rate but for the pauses."""
    began, before, due, size = time.monotonic(), 0.0, 0.0, caller.size()
    while (now := time.monotonic() - began) < plan.seconds:
        due += 0.0 if plan.pauses(now) else (now - before) * rate
        before = now
        if due < size:
            await asyncio.sleep(min(0.2, (size - due) / rate))
            continue
        await caller.submit(size)
        due, size = due - size, caller.size()


@dataclass
class Removed:
    """What retention did: how many jobs went, and the seconds until the first."""

    count: int = 0
    first: float = 0.0


async def prune_on(url: str, store: Store, plan: SoakPlan, removed: Removed, over: asyncio.Event) -> None:
    """Remove what ended longer ago than it is kept, again and again: the duty of a worker does it every ten minutes."""
    pruner = Pruner(store, Retention(ages=dict.fromkeys(TERMINAL, plan.keep), grace=plan.keep))
    began, going = time.monotonic(), True
    while going:
        if pruner.at_end:
            await age_keys(url, plan.keep)
        gone = await pruner.run_once()
        if gone and not removed.count:
            removed.first = time.monotonic() - began
        removed.count += gone
        going = await _goes_on(over, plan.every if pruner.at_end else pruner.rest)


async def age_keys(url: str, keep: float) -> None:
    """Make idempotency keys a day older that are kept long enough for a soak: no soak is as long as their 24 hours."""
    if url.startswith("sqlite"):
        now, day, seconds = f"{time.time() * 1e6:.0f}", "86400000000", f"{keep * 1e6:.0f}"
    else:
        now, day, seconds = "now()", "interval '24 hours'", f"interval '{keep} seconds'"
    await fetch(url, AGE_KEYS.format(now=now, day=day, keep=seconds))


@dataclass
class Followed:
    """What followers got: how many streams, and how many that missed an event or had one twice."""

    streams: int = 0
    torn: int = 0

    def take(self, follows: list[Follow]) -> None:
        """Count what was followed, and let go of it."""
        for follow in follows:
            seqs = [seq for seq, _ in follow.events]
            self.streams += 1
            self.torn += seqs != list(range(follow.after + 1, follow.after + 1 + len(seqs)))
        follows.clear()


async def sample_on(
    installation: Installation, plan: SoakPlan, samples: Samples, followed: Followed, over: asyncio.Event
) -> None:
    going = True
    while going:
        await gauges.read(installation, samples)
        followed.take(installation.history.follows)
        going = await _goes_on(over, plan.every)


async def _goes_on(over: asyncio.Event, seconds: float) -> bool:
    """Wait this long, or until the load is over; return whether it goes on."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds)
    return not over.is_set()


@dataclass
class Findings:
    """All that a soak found out."""

    most: float = 0.0
    """Jobs per second that the machine carries."""
    submitted: int = 0
    repeated: int = 0
    doubled: int = 0
    """Calls that were made again, and those of them that made other jobs."""
    left: int = 0
    """Jobs that have not ended, though the load has."""
    fallen: int = 0
    """Processes that fell, and were started again."""
    removed: Removed = field(default_factory=Removed)
    followed: Followed = field(default_factory=Followed)
    samples: Samples = field(default_factory=Samples)

    def well(self, plan: SoakPlan) -> bool:
        """Whether all is flat and nothing went wrong; and whether that says something."""
        wrong = self.left or self.samples.most(FAILED) or self.doubled or self.followed.torn or self.fallen
        tried = self.removed.count and self.followed.streams and self.repeated
        return bool(not wrong and tried and not self._grown(plan))

    def said(self, plan: SoakPlan) -> Sequence[str]:
        drifts, grown = self.samples.drifts(plan.seconds), self._grown(plan)
        removed, failed = self.removed, self.samples.most(FAILED)
        return [
            f"{self.most:.0f} jobs/s at most; {self.submitted} jobs at half of that in {plan.seconds / 60:.0f} min",
            *map(str, drifts),
            f"{removed.count} jobs were pruned, the first after {removed.first:.0f} s",
            f"{self.left} jobs have not ended; {failed:.0f} failed",
            f"{self.repeated} calls were made twice; {self.doubled} of them made other jobs the second time",
            f"{self.followed.streams} streams were followed; {self.followed.torn} missed an event, or had one twice",
            f"{self.fallen} processes fell",
            "flat" if not grown else f"{len(grown)} of {len(drifts)} lines grow",
        ]

    def _grown(self, plan: SoakPlan) -> Sequence[Drift]:
        return [drift for drift in self.samples.drifts(plan.seconds) if not drift.flat]


async def soak(plan: SoakPlan, store_kind: str) -> Findings:
    """Soak an installation."""
    history = History(seed=0, store=store_kind, ttl=TTL)
    settings = {"RETENTION_DAYS": str(plan.keep / 86_400)}
    async with (
        running_installation(
            history, store_kind, settings=settings, postgres_settings=[f"autovacuum_naptime={plan.vacuum}"]
        ) as installation,
        await open_store(installation.url, listen=False) as store,
        contextlib.aclosing(Caller([installation.url_of(name) for name in SERVERS], random.Random(0))) as caller,
    ):
        most = await capacity(installation, caller)
        before = caller.submitted
        found = Findings(most=most)
        await _soak(installation, store, caller, plan, found)
        found.left = await _left(installation)
        found.submitted = caller.submitted - before
        found.repeated, found.doubled, found.fallen = caller.repeated, caller.doubled, len(history.exits)
    return found


async def _soak(installation: Installation, store: Store, caller: Caller, plan: SoakPlan, found: Findings) -> None:
    """The load, and all that goes on beside it; nothing of that is cut off in the middle."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(sample_on(installation, plan, found.samples, found.followed, over))
        group.create_task(prune_on(installation.url, store, plan, found.removed, over))
        for n in range(FOLLOWERS):
            group.create_task(follow_on(installation, caller.known, random.Random(n)))
        await load(caller, found.most / 2, plan)
        over.set()
        installation.calm = True
    found.followed.take(installation.history.follows)


async def _left(installation: Installation) -> int:
    """How many jobs have not ended, though the load has."""
    until = time.monotonic() + SETTLE_SECONDS
    while (left := await gauges.live(installation.url)) and time.monotonic() < until:  # noqa: ASYNC110 - a database sends no event for it
        await asyncio.sleep(0.5)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="postgres")
    parser.add_argument("--out", type=Path, default=Path("soak.svg"))
    given = parser.parse_args()
    plan = SoakPlan(given.hours * 3600)
    found = asyncio.run(soak(plan, given.store))
    given.out.write_text(svg(found.samples.panels(plan.seconds)))
    print("\n".join([*found.said(plan), f"drawn in {given.out}"]))
    sys.exit(0 if found.well(plan) else 1)


if __name__ == "__main__":
    main()
