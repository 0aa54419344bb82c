"""Runs the duties, wherever a worker or a server lives: one leader saves work, and every duty is safe with two.

Every loop survives a database that is away.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from holdfast.config import Settings
from holdfast.duties import memory, orphans, promoter, remover, repairer, resolver
from holdfast.duties.evictor import Evictor
from holdfast.duties.pruner import Pruner
from holdfast.duties.reaper import Reaper
from holdfast.duties.sweeper import Sweeper
from holdfast.duties.uploads import Uploads
from holdfast.errors import StoreError
from holdfast.model import TERMINAL
from holdfast.pipeline.snapshots import Folders
from holdfast.runner.inputs import Inputs
from holdfast.runner.outputs import Artifacts
from holdfast.store import Store
from holdfast.store.outage import level_of
from holdfast.store.retention import Retention
from holdfast.timing import jitter

log = logging.getLogger(__name__)

LEADER = "duties"
Duty = Callable[[], Awaitable[object]]


class Duties:
    """All duties on their own timers; they rest while another process leads, and begin at once when it is our turn."""

    def __init__(self, store: Store, name: str, settings: Settings) -> None:
        self._store = store
        self._name = name
        self._settings = settings
        self._leads = asyncio.Event()
        self._lead_due = time.monotonic()
        """When the lead is to be renewed; each time is a write."""

    @property
    def leading(self) -> bool:
        return self._leads.is_set()

    async def run(self) -> None:
        """Lead if nobody else does, and do what is due, for ever."""
        store, settings = self._store, self._settings
        reaper = Reaper(store, ttl=settings.lease_ttl, interval=settings.reaper_interval, stuck=self._overdue)
        pruner = Pruner(store, retention_of(settings))
        sweeper = Sweeper(store, Artifacts(settings.shared))
        uploads = Uploads(store, Inputs(settings.shared))
        evictor = Evictor(store, Folders.below(settings.shared), most=settings.snapshots_max_bytes)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lead(reaper))
            group.create_task(every(memory.EVERY, memory.run_once, first=memory.EVERY))
            for name, seconds, duty in (
                ("reaper", settings.reaper_interval, lambda: _reap(reaper, store)),
                ("orphans", settings.reaper_interval, lambda: orphans.run_once(store, grace=settings.orphan_grace)),
                ("promoter", 1.0, lambda: promoter.run_once(store)),
                ("resolver", 1.0, lambda: resolver.run_once(store)),
                ("remover", 5.0, lambda: remover.run_once(store)),
                ("repairer", 60.0, lambda: repairer.run_once(store)),
                ("sweeper", 60.0, sweeper.run_once),
                ("uploads", 60.0, uploads.run_once),
                ("evictor", 60.0, evictor.run_once),
            ):
                group.create_task(every(seconds, self._while_leading(name, duty)))
            # A worker that starts has a backlog to work off first; it may also live for less than ten minutes.
            prune = self._while_leading("pruner", lambda: _prune(pruner))
            group.create_task(every(600.0, prune, first=60.0))

    async def resign(self) -> None:
        """Let another lead at once."""
        await self._store.workers.resign(LEADER, self._name)

    async def _lead(self, reaper: Reaper) -> None:
        ttl = 2 * self._settings.reaper_interval
        while True:
            try:
                leads = await self._store.workers.lead(LEADER, self._name, ttl=ttl) is not None
            except StoreError as error:
                log.log(level_of(error), "not leading: %s", error)
                leads = False
            pause = jitter(ttl / 4)
            if leads:
                reaper.doubt(self._overdue())
                self._lead_due = time.monotonic() + pause
                self._leads.set()
            else:
                self._leads.clear()
            await asyncio.sleep(pause)

    def _overdue(self) -> float:
        """For how long we have waited for the lead to be renewed."""
        return time.monotonic() - self._lead_due

    def _while_leading(self, name: str, duty: Duty) -> Duty:
        async def work() -> None:
            await self._leads.wait()
            await duty()
            self._store.counters.duties[name] = time.time()

        return work


async def every(seconds: float, work: Duty, *, first: float = 0.0) -> None:
    """Do something again and again, after `first` seconds; a failure waits for the next time."""
    await asyncio.sleep(first)
    while True:
        try:
            await work()
        except StoreError as error:
            log.log(level_of(error), "a duty waits for the database: %s", error)
        except Exception:
            log.exception("a duty failed; it is tried again")
        await asyncio.sleep(jitter(seconds))


def retention_of(settings: Settings) -> Retention:
    age = settings.retention_days * 86_400
    return Retention(ages=dict.fromkeys(TERMINAL, age), newest=settings.keep_identical)


async def _reap(reaper: Reaper, store: Store) -> None:
    """Clear expired leases, and settle at once what needs nobody to adopt it."""
    await reaper.run_once()
    await orphans.settle_functions(store)


async def _prune(pruner: Pruner) -> None:
    """Go once along all jobs, with rests."""
    while True:
        await pruner.run_once()
        if pruner.at_end:
            return
        await asyncio.sleep(pruner.rest)
