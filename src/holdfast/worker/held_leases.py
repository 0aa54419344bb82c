"""The leases that this worker has.

A `HeldLease` is one lease with its state: until when it is trusted, whether it was lost, which stop request waits. The
table of all of them is shared with the heartbeat's thread, which renews them even while the event loop is blocked.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from holdfast.model import Lease, StopRequest

MARGIN = 0.1
"""The share at the end of a lease's time in which it is no longer trusted."""


class LeaseLost(Exception):
    """The lease is lost: another worker owns the job, or nobody does."""


def boottime() -> float:
    """Return seconds of a clock that also advances while the machine sleeps, as the database's does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HeldLease:
    """One lease of this worker. Only the worker's event loop writes to it, except for the two times."""

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
        """Called when the lease is released, for whatever reason."""
        self.on_renewed: Callable[[float], None] | None = None
        """Called in the heartbeat's thread with the time at which the renewal was requested."""

    @property
    def trusted(self) -> bool:
        return not self.lost and boottime() < self.trusted_until

    def check(self) -> None:
        """Raise LeaseLost if the lease is lost."""
        if self.lost:
            raise LeaseLost

    def lose(self) -> None:
        """Mark the lease as lost: its execution stops and writes nothing more."""
        self.lost = True
        self._changed()

    def receive_stop(self, stop: StopRequest | None) -> None:
        """Keep a stop request if it is new or escalates the one we know."""
        if stop is not None and stop.kind.escalates(None if self.stop is None else self.stop.kind):
            self.stop = stop
            self._changed()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


class HeldLeases:
    """All leases of this worker. Claims in progress are counted: the leases they return are not unknown."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._held_leases: dict[str, HeldLease] = {}
        self._lock = threading.Lock()
        self._claiming = 0

    def __len__(self) -> int:
        return len(self._held_leases)

    def take(self, leases: Iterable[Lease], requested: float) -> list[HeldLease]:
        """Add leases requested at this time. One that we held before under an older token is lost."""
        until = self.until(requested)
        held_leases = [HeldLease(lease, requested, until) for lease in leases]
        with self._lock:
            before = [self._held_leases[held.lease.id] for held in held_leases if held.lease.id in self._held_leases]
            self._held_leases.update((held.lease.id, held) for held in held_leases)
        for held in before:
            held.lose()
        return held_leases

    def drop(self, held: HeldLease) -> None:
        with self._lock:
            if self._held_leases.get(held.lease.id) is held:
                del self._held_leases[held.lease.id]

    def drop_all(self, held_leases: Iterable[HeldLease]) -> None:
        with self._lock:
            for held in held_leases:
                if self._held_leases.get(held.lease.id) is held:
                    del self._held_leases[held.lease.id]

    def get(self, job_id: str) -> HeldLease | None:
        return self._held_leases.get(job_id)

    def all(self) -> Sequence[HeldLease]:
        with self._lock:
            return list(self._held_leases.values())

    def until(self, requested: float) -> float:
        """Return until when a lease is trusted that was renewed by a request sent at this time."""
        return requested + self.ttl * (1 - MARGIN)

    def renewed(self, held_leases: Iterable[HeldLease], requested: float) -> list[Callable[[float], None]]:
        """Extend the trust in these leases; return their callbacks. Called in the heartbeat's thread."""
        until = self.until(requested)
        listeners = []
        for held in held_leases:
            held.renewed_at = max(held.renewed_at, requested)
            held.trusted_until = max(held.trusted_until, until)
            if held.on_renewed is not None:
                listeners.append(held.on_renewed)
        return listeners

    def begin_claim(self) -> None:
        self._claiming += 1

    def end_claim(self) -> None:
        self._claiming -= 1

    @property
    def claiming(self) -> bool:
        return self._claiming > 0


async def require_trust(held: HeldLease, *, look: float = 0.05) -> None:
    """Wait until we may act for a job: no wait while its lease is trusted, else until a heartbeat has renewed it.

    Raise LeaseLost if the lease is lost.
    """
    while not held.trusted:
        held.check()
        await asyncio.sleep(look)
