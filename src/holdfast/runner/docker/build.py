"""Builds the Docker runner of a worker from its settings."""

import logging

from holdfast.config import Settings
from holdfast.runner.base import ContainerLimits, Runner
from holdfast.runner.runner_host import RunnerHost

log = logging.getLogger(__name__)


async def build(host: RunnerHost) -> Runner | None:
    """Return the runner if it is enabled and the extra is installed; the engine may come and go later."""
    settings = host.settings
    if settings.docker_host is None:
        return None
    try:  # Only here: what they need is an extra.
        from holdfast.runner.docker.engine import Engine  # noqa: PLC0415
        from holdfast.runner.docker.runner import DockerRunner  # noqa: PLC0415
    except ModuleNotFoundError:
        log.info("Docker jobs are off: holdfast[docker] is not installed")
        return None
    engine = Engine(settings.docker_host)
    host.stack.push_async_callback(engine.close)
    runner = DockerRunner(
        engine,
        host.installation,
        limits=limits_of(settings),
        log_cap=settings.log_max_bytes,
        state=settings.state,
        allow_root=settings.allow_root_jobs,
    )
    await runner.check()
    return runner


def limits_of(settings: Settings) -> ContainerLimits:
    """Return the default limits of containers."""
    return ContainerLimits(
        memory=settings.docker_memory,
        cpus=settings.docker_cpus,
        pids=settings.docker_pids,
        attempt=settings.attempt_limits,
    )
