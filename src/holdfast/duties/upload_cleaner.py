"""Removes uploads older than a day, and inputs of jobs that are deleted or were never submitted."""

import asyncio

from holdfast.runner.artifacts import ArtifactStore
from holdfast.store import Store

BATCH = 500
GRACE = 3600.0
"""Inputs of an unknown job may belong to a submit that is in progress."""
DAY = 86_400.0


class UploadCleaner:
    """Walks through all jobs with inputs, a bounded step per call, then starts over."""

    def __init__(self, store: Store, artifacts: ArtifactStore, *, grace: float = GRACE, day: float = DAY) -> None:
        self._store = store
        self._artifacts = artifacts
        self._grace = grace
        self._day = day
        self._after = ""

    async def run_once(self) -> int:
        """Clean one step; return how many uploads and inputs were removed."""
        gone = await asyncio.to_thread(self._artifacts.expire_uploads, self._day)
        jobs = await asyncio.to_thread(
            lambda: self._artifacts.jobs_with_inputs(after=self._after, limit=BATCH, older=self._grace)
        )
        self._after = jobs[-1] if len(jobs) == BATCH else ""
        if not jobs:
            return gone
        existing = await self._store.jobs.existing(jobs)
        for job in jobs:
            if job not in existing:
                await asyncio.to_thread(self._artifacts.remove_inputs, job)
                gone += 1
        return gone
