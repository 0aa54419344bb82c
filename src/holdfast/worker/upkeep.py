"""Upkeep of the worker's own host: recovers leases of dead workers, takes back jobs that were unreachable, sweeps
remains of attempts, and reports counters. Duties that run once per installation are in `duties/`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from holdfast.config import Settings
from holdfast.duties.scheduler import every
from holdfast.runner.base import EngineUnreachable, Identity, Runner
from holdfast.runner.state_folder import WorkerLocks
from holdfast.store import Store

log = logging.getLogger(__name__)

RECOVERY_SECONDS = 0.5
SWEEP_SECONDS = 60.0
SWEEP_BATCH = 500
REPORT_SECONDS = 1.0
"""Seconds between writes of the counters: a killed worker loses what it counted since the last one."""
INCOMPLETE_SECONDS = 600.0


class Upkeep:
    """`held` returns whether this worker has a job's lease: the sweep leaves such jobs alone."""

    def __init__(
        self,
        store: Store,
        worker: str,
        settings: Settings,
        *,
        locks: WorkerLocks,
        runners: Sequence[Runner],
        held: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._worker = worker
        self._settings = settings
        self._locks = locks
        self._runners = runners
        self._held = held
        self._reported: Mapping[str, Any] | None = None
        self._kept: Mapping[str, Any] = {}
        """Counters reported in rows that have been removed: they are in the totals already."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(every(RECOVERY_SECONDS, self.recover_dead))
            group.create_task(every(self._settings.reaper_interval, self.recover_lost))
            group.create_task(every(SWEEP_SECONDS, self.sweep))
            group.create_task(every(self._settings.heartbeat_interval, self.report))
            group.create_task(every(REPORT_SECONDS, self.report_counts))

    async def recover_dead(self) -> int:
        """Hand over the leases of dead workers of this host: those whose lock files are no longer locked."""
        recovered = 0
        for other in self._locks.others(self._worker):
            with self._locks.taken_from_dead(other) as dead:
                if dead:
                    ids = await self._store.leases.orphan(other)
                    log.warning("worker %s is dead; handed over %d of its jobs", other, len(ids))
                    recovered += len(ids)
        return recovered

    async def report(self) -> None:
        """Write this worker's counters to its row if they changed."""
        await self._report(self._since_kept())

    async def report_counts(self) -> None:
        """Write the counters unless only the times of duties changed: an idle leader need not write every second."""
        figures = self._since_kept()
        if _counts(figures) != _counts(self._reported or {}):
            await self._report(figures)

    async def _report(self, figures: Mapping[str, Any]) -> None:
        if figures == self._reported:
            return
        if await self._store.workers.report(self._worker, figures, first=self._reported is None):
            self._reported = figures
        elif self._reported is not None:  # The row was removed, and our last report was added to the totals.
            self._kept = _added(self._kept, self._reported)
            self._reported = None

    def _since_kept(self) -> Mapping[str, Any]:
        return _added(self._store.counters.figures(), self._kept, -1)

    async def recover_lost(self) -> int:
        """Recover jobs that were paused as lost because no worker could reach their domain."""
        domains = [domain for runner in self._runners for domain in runner.domains]
        return len(await self._store.leases.recover(domains)) if domains else 0

    async def sweep(self) -> int:
        """Remove the remains of attempts that are over, and stop those whose job has moved on.

        A claim is committed before its folder is made, so a folder without an open attempt belongs to one that is over.
        """
        swept = 0
        for runner in self._runners:
            try:
                swept += await self._sweep(runner) if runner.domains else 0
            except EngineUnreachable as error:
                log.warning(
                    "cannot sweep the attempts of runner %s now, trying again in the next round: %s",
                    runner.capability,
                    error,
                )
        return swept

    async def _sweep(self, runner: Runner) -> int:
        found = await runner.remaining_attempts()
        swept = 0
        for one in runner.to_sweep([one async for one in self._over(found)], len(found)):
            if not self._held(one.job):
                swept += await self._swept(runner, one)
        return swept + await runner.sweep_incomplete(INCOMPLETE_SECONDS)

    async def _swept(self, runner: Runner, one: Identity) -> bool:
        """Sweep one attempt. An error with one must not block the others."""
        try:
            return await runner.sweep(one)
        except EngineUnreachable:
            raise
        except Exception:
            log.exception("cannot remove the remains of attempt %s; the next sweep tries again", one.mark)
            return False

    async def _over(self, found: Sequence[Identity]) -> AsyncIterator[Identity]:
        """Yield the attempts that are over in the record, or unknown to it."""
        for n in range(0, len(found), SWEEP_BATCH):
            part = [one for one in found[n : n + SWEEP_BATCH] if not self._held(one.job)]
            current = await self._store.attempts.current([(one.job, one.attempt) for one in part])
            for one in part:
                if (one.job, one.attempt) not in current:
                    yield one


def _counts(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name != "duties"}


def _added(figures: Mapping[str, Any], others: Mapping[str, Any], sign: int = 1) -> dict[str, Any]:
    """Add one report to another, or subtract it."""
    numbers = {name for name, value in {**figures, **others}.items() if isinstance(value, int)}
    added = {name: figures.get(name, 0) + sign * others.get(name, 0) for name in numbers}
    finishes, more = figures.get("finishes", {}), others.get("finishes", {})
    ends = {status: finishes.get(status, 0) + sign * more.get(status, 0) for status in {*finishes, *more}}
    return {**figures, **added, "finishes": ends}
