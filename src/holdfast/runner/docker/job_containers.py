"""Removes the containers of deleted jobs, with volumes and workspaces, from the engine that this process reaches."""

import logging
from collections.abc import Set
from pathlib import Path

from holdfast.runner.base import ContainerLimits, EngineUnreachable

log = logging.getLogger(__name__)


class JobContainers:
    """Connects for each call: jobs are deleted rarely, and a server needs no engine otherwise.

    What connects is imported in the call, as it takes long to import.
    """

    def __init__(self, host: str, installation: str, *, limits: ContainerLimits, log_cap: int, state: Path) -> None:
        self._host = host
        self._installation = installation
        self._limits = limits
        self._log_cap = log_cap
        self._state = state

    async def remove(self, jobs: Set[str]) -> Set[str] | None:
        """Remove the containers of ended jobs; return the jobs that still have one, None if no engine answers."""
        from holdfast.runner.docker.engine import Engine, EngineError  # noqa: PLC0415
        from holdfast.runner.docker.runner import DockerRunner  # noqa: PLC0415

        engine = Engine(self._host)
        try:
            runner = DockerRunner(
                engine, self._installation, limits=self._limits, log_cap=self._log_cap, state=self._state
            )
            await runner.check()
            if runner.away is not None:
                return None
            left = set()
            for one in await runner.remaining_attempts():
                if one.job not in jobs:
                    continue
                try:
                    removed = await runner.sweep(one)
                except EngineError:  # A worker removes it at this moment.
                    removed = False
                if not removed:
                    left.add(one.job)
            return left
        except (EngineUnreachable, EngineError) as error:
            log.info("cannot remove the containers of deleted jobs, leaving them to the workers: %s", error)
            return None
        finally:
            await engine.close()
