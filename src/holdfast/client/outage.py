"""An unreachable server: logged once, waited for up to a limit, and logged once when it is back."""

import asyncio
import logging
import time

from holdfast.errors import HoldfastError
from holdfast.timing import backoff, jitter

log = logging.getLogger(__name__)


class ServerUnreachable(HoldfastError):
    """The server did not answer, and the retries of the call are used up."""

    status = 503
    code = "unreachable"


class Reachability:
    """Whether a client's server answers, shared by all its calls. Logs a change once, however many calls wait."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self.timeout = timeout
        self._away = False

    def lost(self, error: Exception) -> None:
        if not self._away:
            self._away = True
            within = f"{self.timeout / 60:.0f} minutes" if self.timeout >= 120 else f"{self.timeout:.0f} s"
            log.warning("cannot reach %s (%s); retrying for up to %s", self.url, cause(error), within)

    def answered(self) -> None:
        if self._away:
            self._away = False
            log.warning("%s is back", self.url)


class ServerOutage:
    """How long one call could not reach its server, and the pauses between its retries."""

    def __init__(self, server: Reachability) -> None:
        self._server = server
        self._since: float | None = None
        self._failures = 0

    def heard(self) -> None:
        self._since = None
        self._failures = 0

    async def pause(self, error: Exception, *, answered: bool = False) -> None:
        """Sleep before the next try, or give up. `answered`: the server did answer, and only the stream broke."""
        now = time.monotonic()
        if answered or self._since is None:
            self._since = now
        if (gone := now - self._since) >= self._server.timeout:
            raise ServerUnreachable(f"cannot reach {self._server.url} for {gone:.0f} s: {cause(error)}") from error
        if not answered:
            self._server.lost(error)
        self._failures += 1
        await asyncio.sleep(retry_delay(self._failures))


def retry_delay(failures: int) -> float:
    """Return the seconds before the next try."""
    return jitter(backoff(failures, base=0.1, cap=2.0))


def cause(error: Exception) -> str:
    return str(error) or type(error).__name__
