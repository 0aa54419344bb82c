"""Watches one Docker engine: whether it is reachable, whether it is still the same one, and what its clock says.

"Not found" counts only if the engine that an attempt ran on says it; `verify` finds out which engine answers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from holdfast.runner.base import EngineUnreachable
from holdfast.runner.docker.container import boottime
from holdfast.runner.docker.container_config import EngineClock
from holdfast.runner.docker.engine import Engine, EngineError, EngineInfo
from holdfast.runner.start_pause import StartPause
from holdfast.timing import jitter

log = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
CLOCK_SECONDS = 10.0
"""How long a reading of the engine's clock is valid."""
USUAL_ROOT = "/var/lib/docker"


class EngineWatch:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.clock = EngineClock(0.0, 0.0)
        self.domain = ""
        self.processors = 1
        self.restricts_mounts = True
        self._away: str | None = f"the Docker engine at {engine.host} has not been contacted yet"
        self._pause = StartPause()
        self._verified = ("", -1)
        self._failure_noted = asyncio.Event()

    @property
    def away(self) -> str | None:
        return self._away or self._pause.why

    def pause(self, why: str) -> None:
        self._pause.begin(why)
        self._failure_noted.set()

    @property
    def paused(self) -> str | None:
        return self._pause.why

    @property
    def domains(self) -> Sequence[str]:
        return [self.domain] if self._away is None else []

    async def watch(self, changed: Callable[[], None]) -> None:
        reported = (self.domains, self.away)
        while True:
            await self.check()
            if reported != (self.domains, self.away):
                reported = (self.domains, self.away)
                changed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(jitter(CHECK_SECONDS)):
                    await self._failure_noted.wait()
            self._failure_noted.clear()
            await asyncio.sleep(0.05)

    def note_failure(self) -> None:
        """Check the engine now, because it did not answer a call."""
        self._failure_noted.set()

    async def check(self) -> None:
        """Check whether the engine is reachable, and whether it is the same one."""
        try:
            if self._away is None and boottime() - self.clock.ours < CLOCK_SECONDS:
                await self._engine.ping()
                return
            self._known(await self._engine.info())
        except EngineUnreachable as error:
            self._gone(str(error))
        except EngineError as error:
            self._gone(f"the Docker engine at {self._engine.host} refused the request: {error}")

    def _gone(self, why: str) -> None:
        if self._away is None:
            log.warning("%s; no container is started or removed there until it answers again", why)
        self._away = why

    def _known(self, info: EngineInfo) -> None:
        """Note the engine's identity and its clock, which was read now or a little earlier."""
        self.clock = EngineClock(info.time, boottime())
        domain = domain_of(info)
        if self._away is not None or domain != self.domain:
            log.info("connected to the Docker engine at %s: domain %s, host %s", self._engine.host, domain, info.host)
        self.domain, self._away = domain, None
        self.processors = max(1, info.processors)
        self.restricts_mounts = info.restricts_mounts

    async def verify(self, domain: str) -> None:
        """Verify that the engine which just answered is the one of this domain; only then does "not found" count."""
        connections = self._engine.connections
        try:
            info = await self._engine.info()
        except EngineError as error:
            raise EngineUnreachable(f"the Docker engine at {self._engine.host} returned an error: {error}") from error
        if domain_of(info) != domain:
            self.note_failure()
            raise EngineUnreachable(f"the Docker engine at {self._engine.host} is {domain_of(info)}, not {domain}")
        self._verified = (domain, connections)

    async def same_engine(self, domain: str) -> None:
        """Verify the engine, unless no connection was opened since the last time: open ones lead to the same engine."""
        if self._verified != (domain, self._engine.connections):
            await self.verify(domain)

    async def fresh_clock(self) -> EngineClock:
        if boottime() - self.clock.ours > CLOCK_SECONDS:
            self._known(await self._engine.info())
        return self.clock


def domain_of(info: EngineInfo) -> str:
    """Name an engine. Engines on the same host may share their id, but not their data folder."""
    return f"docker:{info.id}" if info.root == USUAL_ROOT else f"docker:{info.id}:{info.root}"
