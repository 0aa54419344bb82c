"""A simulated operator: resumes, resolves and dismisses the jobs that wait for a person, after checking them."""

import asyncio
import contextlib
import random
import subprocess
from collections.abc import Mapping
from typing import Any

from torture.calls import Recorder
from torture.clients import Known
from torture.final_state import fetch
from torture.history import boottime
from torture.installation import FOREVER, Installation
from torture.processes import children, containers, kill
from torture.token_usage import RAISED

WAITING = """
SELECT id, status, lane, attempt, phase, domain, error_code, dismissed, started_at FROM {schema}jobs
WHERE status IN ('paused', 'pending') OR (status IN ('failed', 'timed_out') AND lane IS NOT NULL)
"""
LIVE = """
SELECT count(*) AS n FROM {schema}jobs
WHERE status NOT IN ('succeeded', 'failed', 'timed_out', 'cancelled') OR stop_kind = 'delete'
"""
ENGINE_HANGS = 30.0
"""Seconds without an answer from a container engine, after which a person starts it again."""


class Operator:
    def __init__(self, installation: Installation, recorder: Recorder, known: Known, rng: random.Random) -> None:
        self._world = installation
        self._recorder = recorder
        self._known = known
        self._rng = rng

    async def keep(self) -> None:
        """Look for work twice a second; do nothing while the database is away."""
        while True:
            with contextlib.suppress(OSError):
                await self.look()
            await asyncio.sleep(0.5)

    async def count_on(self) -> None:
        """Tell the clients how many jobs are live, also while the operator waits."""
        while True:
            with contextlib.suppress(OSError):
                self._known.live = await self.live()
            await asyncio.sleep(0.5)

    async def tend_engine(self) -> None:
        """Restart an engine that does not answer; its containers keep running.

        Debian's dockerd 20.10 does: networks and their endpoints wait for each other's locks.
        """
        installation, silent_since = self._world, boottime()
        assert installation.engine is not None
        while True:
            answer = await asyncio.to_thread(installation.engine.get, "info")
            if answer or installation.engine_struck:
                silent_since = boottime()
            elif boottime() - silent_since > ENGINE_HANGS:
                installation.engine_struck = True
                fault = installation.note("hung dockerd", lasts=FOREVER)
                await asyncio.to_thread(installation.engine.kill)
                await asyncio.to_thread(installation.engine.start)
                fault.until = boottime()
                installation.engine_struck = False
            await asyncio.sleep(1.0)

    async def live(self) -> int:
        """How many jobs have not ended, or are still being deleted."""
        ((row,),) = await fetch(self._world.url, LIVE)
        return int(row["n"])

    async def look(self) -> None:
        """Handle the jobs that wait for a person."""
        (waiting,) = await fetch(self._world.url, WAITING)
        for row in waiting:
            if self._world.calm or self._rng.random() < 0.3:
                await self._settle(str(row["id"]), row)

    async def _settle(self, job: str, row: Mapping[str, Any]) -> None:
        calm, rng = self._world.calm, self._rng
        match row["status"]:
            case "pending":
                await self._recorder.move("release", job)
            case "paused" if row["phase"] is None:
                await self._recorder.move("resolve" if calm else rng.choice(["resume", "resolve"]), job)
            case "paused":
                await self._settle_open(job, row)
            case _ if not row["dismissed"] and row["started_at"] is not None:
                verbs = ["resolve", "dismiss"] if calm else ["resume", "resolve", "dismiss"]
                await self._recorder.move(rng.choice(verbs), job)

    async def _settle_open(self, job: str, row: Mapping[str, Any]) -> None:
        """Its attempt is open: it may run. One that is lost is left to its host, which comes back, unless that is dead.

        To say `stopped` without having made sure is the one thing that a person must not do. What it used may be all
        that it had: it gets more.
        """
        host = self._host_of(str(row["domain"]))
        if row["error_code"] != "lost" or (host is not None and host in self._world.dead_hosts):
            try:
                await asyncio.to_thread(self._end, job, int(row["attempt"]))
            except subprocess.CalledProcessError:
                return  # Its engine is away, or lets it go just now: there is no being sure.
            self._world.note("made sure", attempts=[(job, int(row["attempt"]))])
            await self._recorder.move("resume", job, stopped=True, budget={"tokens": RAISED})

    def _end(self, job: str, attempt: int) -> None:
        """Kill the processes of an attempt."""
        for child in list(children(self._world.folder)):
            if (child.job, child.attempt) == (job, attempt):
                kill(child.pid)
        if (engine := self._world.engine) is not None:
            for name, child in containers(engine):
                if (child.job, child.attempt) == (job, attempt):
                    engine.docker("kill", name)

    def _host_of(self, domain: str) -> str | None:
        for name in {part.host for part in self._world.workers}:
            file = self._world.host(name) / "host"
            if file.exists() and file.read_text().strip() in domain:
                return name
        return None
