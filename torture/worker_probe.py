"""A probe inside a worker: it records heartbeats, writes, and the times in which the process got no CPU.

Whether a lease was taken for a reason cannot be seen from outside: a machine that is busy with other things may keep a
worker from its beats. So somebody in the same process looks at the clock, and writes into a file of the harness. Nor
does the database say with which token a write was made, if it did not look at the token.
"""

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.model import HeartbeatReply, Lease, Outcome, Status
from holdfast.store.events import Appended, Events
from holdfast.store.leases import Leases
from torture.history import boottime

TICK = 0.1
LATE = 0.2
"""Seconds by which a tick is late when it is worth a line."""


def watch(path: Path, worker: str) -> None:
    """Note this worker's heartbeats, writes and lags from now on."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    _watch_beats(fd)
    _watch_ends(fd, worker)
    _watch_events(fd, worker)
    _watch_returns(fd, worker)
    threading.Thread(target=_tick_on, args=(fd, worker), name="torture-witness", daemon=True).start()


def _watch_beats(fd: int) -> None:
    beat = Leases.beat

    async def watched(self: Leases, worker: str, leases: Iterable[Lease], *, ttl: float) -> HeartbeatReply:
        asked, renewed = boottime(), None
        try:
            pulse = await beat(self, worker, leases, ttl=ttl)
            renewed = [(job.id, job.token) for job in pulse.jobs if job.answer == "yours"]
            return pulse
        finally:
            _write(fd, "beat", worker, asked, boottime(), renewed)

    Leases.beat = watched  # type: ignore[method-assign]


def _watch_ends(fd: int, worker: str) -> None:
    finish = Leases.finish

    async def watched(self: Leases, ends: Sequence[tuple[Lease, Outcome]]) -> Mapping[str, Status | None]:
        asked = boottime()
        answers = await finish(self, ends)
        for lease, _ in ends:
            landed = answers.get(lease.id) is not None
            _write(fd, "write", worker, "finish", lease.id, lease.token, asked, boottime(), landed)
        return answers

    Leases.finish = watched  # type: ignore[method-assign]


def _watch_events(fd: int, worker: str) -> None:
    append = Events.append

    async def watched(self: Events, lease: Lease, *more: Any, **fields: Any) -> Appended:
        asked = boottime()
        answer = await append(self, lease, *more, **fields)
        landed = answer.answer == "landed"
        _write(fd, "write", worker, "append", lease.id, lease.token, asked, boottime(), landed)
        return answer

    Events.append = watched  # type: ignore[method-assign]


def _watch_returns(fd: int, worker: str) -> None:
    """Both ways to give a lease back while the work goes on; noted before, as the answer may be lost."""
    hand_over, release_unknown = Leases.hand_over, Leases.release_unknown

    async def handed(self: Leases, leases: Iterable[Lease], **more: Any) -> frozenset[str]:
        given = list(leases)
        _note_returns(fd, worker, given)
        return await hand_over(self, given, **more)

    async def given_back(self: Leases, worker: str, beats: Sequence[Any]) -> frozenset[str]:
        _note_returns(fd, worker, [beat for beat in beats if beat.answer == "unknown"])
        return await release_unknown(self, worker, beats)

    Leases.hand_over = handed  # type: ignore[method-assign]
    Leases.release_unknown = given_back  # type: ignore[method-assign]


def _note_returns(fd: int, worker: str, given: Iterable[Any]) -> None:
    now = boottime()
    for lease in given:
        _write(fd, "write", worker, "hand_over", lease.id, lease.token, now, now, True)


def _tick_on(fd: int, worker: str) -> None:
    while True:
        due = boottime() + TICK
        time.sleep(TICK)
        if (now := boottime()) > due + LATE:
            _write(fd, "lag", worker, due, now)


def _write(fd: int, *fields: object) -> None:
    """Add a line, in one write: others write to the same file."""
    os.write(fd, msgspec.json.encode(fields) + b"\n")
