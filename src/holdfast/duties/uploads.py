"""Uploads: removes those that are a day old, and what was given to jobs that are gone or never came."""

import asyncio

from holdfast.runner.inputs import Inputs
from holdfast.store import Store

BATCH = 500
GRACE = 3600.0
"""What was given to a job that is not there yet may belong to a submit that is on its way."""
DAY = 86_400.0


class Uploads:
    """A bounded step along all jobs with inputs per call, from the beginning again at the end."""

    def __init__(self, store: Store, inputs: Inputs, *, grace: float = GRACE, day: float = DAY) -> None:
        self._store = store
        self._inputs = inputs
        self._grace = grace
        self._day = day
        self._after = ""

    async def run_once(self) -> int:
        """Return how many went."""
        gone = await asyncio.to_thread(self._inputs.expire, self._day)
        jobs = await asyncio.to_thread(lambda: self._inputs.jobs(after=self._after, limit=BATCH, older=self._grace))
        self._after = jobs[-1] if len(jobs) == BATCH else ""
        if not jobs:
            return gone
        there = await self._store.jobs.existing(jobs)
        for job in jobs:
            if job not in there:
                await asyncio.to_thread(self._inputs.remove, job)
                gone += 1
        return gone
