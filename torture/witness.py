"""A witness within a worker: how its heartbeats went, and when its process got no turn.

Whether a lease was taken for a reason cannot be seen from outside: a machine that is busy with other things may keep a
worker from its beats. So somebody in the same process looks at the clock, and writes into a file of the harness.
"""

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast.model import Lease, Pulse
from holdfast.store.leases import Leases
from torture.history import boottime

TICK = 0.1
LATE = 0.2
"""Seconds by which a tick is late when it is worth a line."""


def watch(path: Path, worker: str) -> None:
    """Note this worker's heartbeats and lags from now on."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    _watch_beats(fd)
    threading.Thread(target=_tick_on, args=(fd, worker), name="torture-witness", daemon=True).start()


def _watch_beats(fd: int) -> None:
    beat = Leases.beat

    async def watched(self: Leases, worker: str, leases: Iterable[Lease], *, ttl: float) -> Pulse:
        asked, renewed = boottime(), None
        try:
            pulse = await beat(self, worker, leases, ttl=ttl)
            renewed = [(job.id, job.token) for job in pulse.jobs if job.answer == "yours"]
            return pulse
        finally:
            _write(fd, "beat", worker, asked, boottime(), renewed)

    Leases.beat = watched  # type: ignore[method-assign]


def _tick_on(fd: int, worker: str) -> None:
    while True:
        due = boottime() + TICK
        time.sleep(TICK)
        if (now := boottime()) > due + LATE:
            _write(fd, "lag", worker, due, now)


def _write(fd: int, *fields: object) -> None:
    """Add a line, in one write: others write to the same file."""
    os.write(fd, msgspec.json.encode(fields) + b"\n")
