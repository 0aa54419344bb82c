"""Sweeper: removes artifacts that no recorded attempt owns: of deleted jobs, and of workers that lost a lease."""

import asyncio
from collections.abc import Sequence, Set

from holdfast.runner.artifacts import ArtifactStore, outputs_name
from holdfast.store import Store

BATCH = 500
GRACE = 3600.0
"""Outputs younger than this may belong to an owner that has not finished yet."""
DELETED_GRACE = 60.0
"""The same for jobs that are not in the record at all: a job exists before its first attempt."""


class Sweeper:
    """Walks through the artifacts of all jobs, a bounded step per call, then starts over."""

    def __init__(self, store: Store, artifacts: ArtifactStore, *, grace: float = GRACE) -> None:
        self._store = store
        self._artifacts = artifacts
        self._grace = grace
        self._after = ""

    async def run_once(self) -> int:
        """Sweep one step; return of how many attempts the outputs were removed."""
        jobs = await asyncio.to_thread(self._artifacts.jobs, self._after, BATCH)
        self._after = jobs[-1] if len(jobs) == BATCH else ""
        if not jobs:
            return 0
        tokens = await self._store.attempts.tokens([job for job in jobs if _is_id(job)])
        kept = {(job, outputs_name(attempt, token)) for job, attempt, token in tokens}
        return await asyncio.to_thread(self._sweep, jobs, kept)

    def _sweep(self, jobs: Sequence[str], kept: Set[tuple[str, str]]) -> int:
        gone = 0
        existing_jobs = {job for job, _ in kept}
        for job in jobs:
            grace = self._grace if job in existing_jobs else min(self._grace, DELETED_GRACE)
            for outputs in self._artifacts.stored(job):
                if (job, outputs.name) not in kept and outputs.age >= grace:
                    self._artifacts.remove(job, outputs.name)
                    gone += 1
            if job not in existing_jobs and not self._artifacts.stored(job):
                self._artifacts.remove(job)
        return gone


def _is_id(name: str) -> bool:
    return len(name) == 36 and name.count("-") == 4
