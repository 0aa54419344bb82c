"""The care of a worker's own host: dead workers beside it, jobs that waited for it, folders that nobody needs."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from holdfast.config import Settings
from holdfast.duties.leading import every
from holdfast.runner.base import Runner
from holdfast.runner.host import Locks
from holdfast.runner.process import ProcessRunner
from holdfast.store import Store

log = logging.getLogger(__name__)

RECOVERY_SECONDS = 0.5
SWEEP_SECONDS = 60.0
SWEEP_BATCH = 500
HALF_MADE_SECONDS = 600.0


class Chores:
    """`held` says whether this worker has a job in its hands: then its folder is none of our business."""

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

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(every(RECOVERY_SECONDS, self.recover_dead))
            group.create_task(every(self._settings.reaper_interval, self.recover_lost))
            group.create_task(every(SWEEP_SECONDS, self.sweep))

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
        """Remove what is left of attempts that are over, and stop those whose job has moved on.

        A claim is committed before its folder is made, so a folder whose attempt is not open any more is over.
        """
        swept = 0
        for runner in self._runners:
            found = [identity for identity in await runner.left_over() if not self._held(identity.job)]
            for n in range(0, len(found), SWEEP_BATCH):
                part = found[n : n + SWEEP_BATCH]
                current = await self._store.attempts.current([(one.job, one.attempt) for one in part])
                for one in part:
                    if (one.job, one.attempt) not in current and not self._held(one.job):
                        swept += await runner.sweep(one)
            swept += await runner.sweep_halves(HALF_MADE_SECONDS)
        return swept
