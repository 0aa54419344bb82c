"""Runs the duties in every worker and server: only the leader works, to save effort; every duty is safe with two.

Every loop survives a database outage.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from holdfast.config import Settings
from holdfast.duties import (
    expirer,
    job_deleter,
    malloc_trim,
    orphan_settler,
    promoter,
    repairer,
    resolver,
    store_reserve,
    worker_pruner,
)
from holdfast.duties.evictor import Evictor
from holdfast.duties.pruner import Pruner
from holdfast.duties.reaper import Reaper
from holdfast.duties.sweeper import Sweeper
from holdfast.duties.upload_cleaner import UploadCleaner
from holdfast.errors import StoreError
from holdfast.model import TERMINAL
from holdfast.pipeline.snapshots import SnapshotFolders
from holdfast.runner.artifacts import ArtifactStore
from holdfast.runner.disk import disks_of
from holdfast.store import Store
from holdfast.store.outage import level_of
from holdfast.store.retention import Retention
from holdfast.timing import jitter

log = logging.getLogger(__name__)

LEADER = "duties"
Duty = Callable[[], Awaitable[object]]


class DutyScheduler:
    """All duties on their own timers. They wait while another process leads, and start at once when we lead."""

    def __init__(self, store: Store, name: str, settings: Settings, artifacts: ArtifactStore) -> None:
        self._store = store
        self._name = name
        self._settings = settings
        self._artifacts = artifacts
        self._leads = asyncio.Event()
        self._lead_due = time.monotonic()
        """When the leadership must be renewed; each renewal is a write."""

    @property
    def leading(self) -> bool:
        return self._leads.is_set()

    async def run(self) -> None:
        """Lead if nobody else does, and run the duties, forever."""
        store, settings = self._store, self._settings
        reaper = Reaper(store, ttl=settings.lease_ttl, interval=settings.reaper_interval, stuck=self._overdue)
        pruner = Pruner(store, retention_of(settings), audit_age=settings.audit_days * 86_400)
        sweeper = Sweeper(store, self._artifacts)
        uploads = UploadCleaner(store, self._artifacts)
        evictor = Evictor(store, SnapshotFolders.below(settings.shared), most=settings.snapshots_max_bytes)
        disks = disks_of(settings, state=False)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lead(reaper))
            group.create_task(every(malloc_trim.EVERY, malloc_trim.run_once, first=malloc_trim.EVERY))
            for name, seconds, duty in (
                ("reaper", settings.reaper_interval, lambda: _reap(reaper, store)),
                (
                    "orphans",
                    settings.reaper_interval,
                    lambda: orphan_settler.run_once(store, grace=settings.orphan_grace),
                ),
                ("promoter", 1.0, lambda: promoter.run_once(store)),
                ("resolver", 1.0, lambda: resolver.run_once(store)),
                ("expirer", 5.0, lambda: expirer.run_once(store)),
                ("remover", 5.0, lambda: job_deleter.run_once(store)),
                ("worker_pruner", 5.0, lambda: worker_pruner.run_once(store)),
                ("repairer", 60.0, lambda: repairer.run_once(store)),
                ("room", store_reserve.EVERY, lambda: store_reserve.run_once(store, disks)),
                ("sweeper", 60.0, sweeper.run_once),
                ("uploads", 60.0, uploads.run_once),
                ("evictor", 60.0, evictor.run_once),
            ):
                group.create_task(every(seconds, self._while_leading(name, duty), name=name))
            # A new worker should start with its backlog; it may also live for less than ten minutes.
            prune = self._while_leading("pruner", lambda: _prune(pruner))
            group.create_task(every(600.0, prune, first=60.0, name="pruner"))

    async def resign(self) -> None:
        """Give up the leadership, so that another process can lead at once."""
        await self._store.workers.resign(LEADER, self._name)

    async def _lead(self, reaper: Reaper) -> None:
        ttl = 2 * self._settings.reaper_interval
        while True:
            try:
                leads = await self._store.workers.lead(LEADER, self._name, ttl=ttl) is not None
            except StoreError as error:
                log.log(level_of(error), "cannot renew the leadership, not leading for now: %s", error)
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
        """Return by how many seconds the renewal of the leadership is overdue."""
        return time.monotonic() - self._lead_due

    def _while_leading(self, name: str, duty: Duty) -> Duty:
        async def work() -> None:
            await self._leads.wait()
            await duty()
            self._store.counters.duties[name] = time.time()

        return work


async def every(seconds: float, work: Duty, *, first: float = 0.0, name: str | None = None) -> None:
    """Repeat some work every `seconds`, after `first` seconds; a failure is logged and retried the next time."""
    name = name or getattr(work, "__qualname__", "a duty")
    await asyncio.sleep(first)
    while True:
        try:
            await work()
        except StoreError as error:
            log.log(level_of(error), "%s failed, retrying in %g s: %s", name, seconds, error)
        except Exception:
            log.exception("%s failed, retrying in %g s", name, seconds)
        await asyncio.sleep(jitter(seconds))


def retention_of(settings: Settings) -> Retention:
    age = settings.retention_days * 86_400
    return Retention(ages=dict.fromkeys(TERMINAL, age), newest=settings.keep_identical)


async def _reap(reaper: Reaper, store: Store) -> None:
    """Clear expired leases, and settle at once the orphans that need no adoption."""
    await reaper.run_once()
    await orphan_settler.settle_functions(store)


async def _prune(pruner: Pruner) -> None:
    """Prune all jobs once, with pauses."""
    while True:
        await pruner.run_once()
        if pruner.at_end:
            return
        await asyncio.sleep(pruner.rest)
