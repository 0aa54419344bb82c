"""The leases in this worker's hands.

A `Hold` is one lease and what is known about it: until when it may be trusted, whether it was lost, what stop request
waits. The table of all holds is shared with the heartbeat's thread, which renews them whatever the loop is doing.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from holdfast.model import Lease, StopRequest

MARGIN = 0.1
"""The share of a lease's time at whose end it is no longer trusted."""


class Lost(Exception):
    """Somebody else owns the job now."""


def boottime() -> float:
    """Seconds that also pass while the machine sleeps, as they do for the database."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Hold:
    """One lease in our hands. Everything but the two times is written on the worker's loop alone."""

    __slots__ = (
        "finishing", "lease", "lost", "on_change", "on_release", "on_renewed", "renewed_at", "stop", "trusted_until",
    )  # fmt: skip

    def __init__(self, lease: Lease, renewed_at: float, trusted_until: float) -> None:
        self.lease = lease
        self.renewed_at = renewed_at
        self.trusted_until = trusted_until
        self.lost = False
        self.finishing = False
        self.stop: StopRequest | None = None
        self.on_change: Callable[[], None] | None = None
        self.on_release: Callable[[], None] | None = None
        """Called when we are done with it, however that came."""
        self.on_renewed: Callable[[float], None] | None = None
        """Called in the heartbeat's thread with the time when the renewal was asked for."""

    @property
    def trusted(self) -> bool:
        return not self.lost and boottime() < self.trusted_until

    def lose(self) -> None:
        """It is somebody else's now: whoever works on it stops acting and writes nothing."""
        self.lost = True
        self._changed()

    def hear_stop(self, stop: StopRequest | None) -> None:
        """Note a stop request; one that was heard before says nothing new."""
        if stop is not None and stop.kind.escalates(None if self.stop is None else self.stop.kind):
            self.stop = stop
            self._changed()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


class Holds:
    """All leases of this worker. Claims that are under way are counted: what they bring is not unknown."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._holds: dict[str, Hold] = {}
        self._lock = threading.Lock()
        self._claiming = 0

    def __len__(self) -> int:
        return len(self._holds)

    def take(self, leases: Iterable[Lease], requested: float) -> list[Hold]:
        """Hold leases that were asked for at this time. One that we held before under an older token is lost."""
        until = self.until(requested)
        holds = [Hold(lease, requested, until) for lease in leases]
        with self._lock:
            before = [self._holds[hold.lease.id] for hold in holds if hold.lease.id in self._holds]
            self._holds.update((hold.lease.id, hold) for hold in holds)
        for hold in before:
            hold.lose()
        return holds

    def drop(self, hold: Hold) -> None:
        with self._lock:
            if self._holds.get(hold.lease.id) is hold:
                del self._holds[hold.lease.id]

    def drop_all(self, holds: Iterable[Hold]) -> None:
        with self._lock:
            for hold in holds:
                if self._holds.get(hold.lease.id) is hold:
                    del self._holds[hold.lease.id]

    def get(self, job_id: str) -> Hold | None:
        return self._holds.get(job_id)

    def all(self) -> Sequence[Hold]:
        with self._lock:
            return list(self._holds.values())

    def until(self, requested: float) -> float:
        """Until when a lease is trusted that was renewed by a request of this time."""
        return requested + self.ttl * (1 - MARGIN)

    def renewed(self, holds: Iterable[Hold], requested: float) -> list[Callable[[float], None]]:
        """Trust these again; return who wants to hear of it. Called in the heartbeat's thread."""
        until = self.until(requested)
        listeners = []
        for hold in holds:
            hold.renewed_at = max(hold.renewed_at, requested)
            hold.trusted_until = max(hold.trusted_until, until)
            if hold.on_renewed is not None:
                listeners.append(hold.on_renewed)
        return listeners

    def begin_claim(self) -> None:
        self._claiming += 1

    def end_claim(self) -> None:
        self._claiming -= 1

    @property
    def claiming(self) -> bool:
        return self._claiming > 0


async def until_trusted(hold: Hold, *, look: float = 0.05) -> bool:
    """Wait until we may act for a job: at once while its lease is trusted, else when a beat has renewed it.

    False means that the lease is lost.
    """
    while not hold.trusted:
        if hold.lost:
            return False
        await asyncio.sleep(look)
    return True
