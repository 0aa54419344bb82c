"""The /etc/hosts of containers without a network: a file of this package, mounted read-only.

An engine that sets up a network sandbox runs its own program several times for it, which is more than half of a start.
A container without a network needs no sandbox: the kernel gives it an empty network with a loopback device. It then
lacks only the file in which the engine would name `localhost`. Where the engine cannot see files of this host, or
restricts what containers can read, the engine sets up the sandbox.
"""

import contextlib
import logging
import stat
from pathlib import Path

from holdfast.runner.base import StartRequest
from holdfast.runner.docker.container_config import NO_NETWORK
from holdfast.runner.docker.engine import Engine, EngineError
from holdfast.runner.docker.engine_watch import EngineWatch

log = logging.getLogger(__name__)

HOSTS = Path(__file__).with_name("hosts")


class HostsFile:
    def __init__(self, engine: Engine, watch: EngineWatch) -> None:
        self._engine = engine
        self._watch = watch
        self._unseen: set[str] = set()
        """Domains of engines that cannot mount the file."""

    def of(self, request: StartRequest) -> Path | None:
        """Return the file that replaces the engine's sandbox of a container; None if the engine has to set it up.

        The engine sets it up for pipelines: nothing but their workspace is mounted from this host.
        """
        without_network = (request.spec.get("network") or NO_NETWORK) == NO_NETWORK and request.pipeline is None
        here = self._engine.host.startswith("unix://") and not self._watch.restricts_mounts
        known = self._watch.domain not in self._unseen
        return HOSTS if without_network and here and known and _readable() else None

    def refused(self, error: EngineError) -> bool:
        """Note if the engine cannot mount the file: its error names it. Return whether that is so.

        The engine may run in a virtual machine, or beside the container in which this worker runs.
        """
        refused = str(HOSTS) in str(error)
        if refused:
            log.info("the Docker engine at %s cannot mount %s: %s", self._engine.host, HOSTS, error)
            self._unseen.add(self._watch.domain)
        return refused


def _readable() -> bool:
    """Return whether the user of a container can read the file: an installation may have removed that permission."""
    with contextlib.suppress(OSError):
        return bool(HOSTS.stat().st_mode & stat.S_IROTH)
    return False
