"""What a worker does beside its jobs: duties while it leads, and the care of its own host.

Duties are safe with two leaders; the lease of the leader only saves work. Every loop survives a database that is away.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from holdfast.config import Settings
from holdfast.duties import orphans, promoter, remover, repairer, resolver
from holdfast.duties.pruner import Pruner
from holdfast.duties.reaper import Reaper
from holdfast.errors import StoreError
from holdfast.model import TERMINAL
from holdfast.runner.base import Runner
from holdfast.runner.host import Locks
from holdfast.runner.process import ProcessRunner
from holdfast.store import Store
from holdfast.store.retention import Retention
from holdfast.timing import jitter

log = logging.getLogger(__name__)

LEADER = "duties"
RECOVERY_SECONDS = 0.5
SWEEP_SECONDS = 60.0
HALF_MADE_SECONDS = 600.0


class Chores:
    def __init__(
        self,
        store: Store,
        worker: str,
        settings: Settings,
        *,
        locks: Locks,
        domains: Sequence[str],
        runners: Sequence[Runner],
        held: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._worker = worker
        self._settings = settings
        self._locks = locks
        self._domains = domains
        self._runners = [runner for runner in runners if isinstance(runner, ProcessRunner)]
        self._held = held
        self._leading = False

    async def run(self) -> None:
        """Do all of it, for ever."""
        reaper = Reaper(self._store, ttl=self._settings.lease_ttl, interval=self._settings.reaper_interval)
        pruner = Pruner(self._store, self._retention())
        store, settings = self._store, self._settings
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lead())
            for every, duty in (
                (settings.reaper_interval, reaper.run_once),
                (settings.reaper_interval, lambda: orphans.run_once(store, grace=settings.orphan_grace)),
                (1.0, lambda: promoter.run_once(store)),
                (1.0, lambda: resolver.run_once(store)),
                (5.0, lambda: remover.run_once(store)),
                (60.0, lambda: repairer.run_once(store)),
                (600.0, lambda: _prune(pruner)),
            ):
                group.create_task(self._every(every, duty, leading=True))
            group.create_task(self._every(RECOVERY_SECONDS, self.recover_dead))
            group.create_task(self._every(settings.reaper_interval, self.recover_lost))
            group.create_task(self._every(SWEEP_SECONDS, self.sweep))

    def _retention(self) -> Retention:
        age = self._settings.retention_days * 86_400
        return Retention(ages=dict.fromkeys(TERMINAL, age), newest=self._settings.keep_identical)

    async def _lead(self) -> None:
        ttl = 2 * self._settings.reaper_interval
        while True:
            try:
                self._leading = await self._store.workers.lead(LEADER, self._worker, ttl=ttl) is not None
            except StoreError as error:
                log.warning("not leading: %s", error)
                self._leading = False
            await asyncio.sleep(jitter(ttl / 4))

    async def _every(self, seconds: float, duty: Callable[[], Awaitable[object]], *, leading: bool = False) -> None:
        while True:
            if self._leading or not leading:
                try:
                    await duty()
                except StoreError as error:
                    log.warning("a chore waits for the database: %s", error)
                except Exception:
                    log.exception("a chore failed; it is tried again")
            await asyncio.sleep(jitter(seconds))

    async def recover_dead(self) -> int:
        """Hand over the leases of workers of this host whose lock files nobody holds any more."""
        recovered = 0
        for other in self._locks.others(self._worker):
            with self._locks.taken_from_dead(other) as dead:
                if dead:
                    ids = await self._store.leases.orphan(other)
                    log.warning("worker %s is dead; %d of its jobs are handed over", other, len(ids))
                    recovered += len(ids)
        return recovered

    async def recover_lost(self) -> int:
        """Take back jobs that wait for a person because nobody could reach this host."""
        return len(await self._store.leases.recover(self._domains))

    async def sweep(self) -> int:
        """Remove what is left of attempts that are over, and stop those whose job has moved on."""
        swept = 0
        for runner in self._runners:
            found = [identity for identity in await runner.left_over() if not self._held(identity.job)]
            for n in range(0, len(found), 500):
                part = found[n : n + 500]
                current = await self._store.attempts.current([(one.job, one.attempt) for one in part])
                for one in part:
                    if (one.job, one.attempt) not in current and not self._held(one.job):
                        swept += await runner.sweep(one)
            swept += await runner.sweep_halves(HALF_MADE_SECONDS)
        return swept


async def _prune(pruner: Pruner) -> None:
    """Go once along all jobs, with rests."""
    while True:
        await pruner.run_once()
        if pruner.at_end:
            return
        await asyncio.sleep(pruner.rest)
