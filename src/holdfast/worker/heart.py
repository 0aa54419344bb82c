"""The heartbeat: renews all leases of a worker in one statement, from a thread with a connection of its own.

User code that blocks the loop, a slow slot or a burst of work cannot starve it. It goes on while the database is away,
and tells the loop what it heard: lost leases, stop requests, a wish to drain, and jobs that the database counts as ours
and that we do not know.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from holdfast.errors import HoldfastError
from holdfast.model import Beat, Lease, Pulse
from holdfast.store.outage import level_of
from holdfast.timing import jitter
from holdfast.worker.lease import Hold, Holds, boottime

log = logging.getLogger(__name__)


class Beats(Protocol):
    async def beat(self, worker: str, leases: list[Lease], *, ttl: float) -> Pulse: ...


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat brought, for the loop to act on."""

    lost: tuple[Hold, ...]
    stops: tuple[tuple[Hold, Beat], ...]
    unknown: tuple[Beat, ...]
    registered: bool
    draining: bool


class Heart:
    """Beats until it is stopped. `connect` is called in the thread, on the thread's own loop."""

    def __init__(
        self,
        worker: str,
        holds: Holds,
        *,
        interval: float,
        connect: Callable[[], Awaitable[tuple[Beats, Callable[[], Awaitable[None]]]]],
        hear: Callable[[Heard], None],
    ) -> None:
        self._worker = worker
        self._holds = holds
        self._interval = interval
        self._connect = connect
        self._hear = hear
        self._main = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._strangers: set[tuple[str, int]] = set()
        self._thread = threading.Thread(target=self._run, name="holdfast-heart", daemon=True)

    async def __aenter__(self) -> "Heart":
        self._thread.start()
        await asyncio.to_thread(self._ready.wait)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while self._stop is None or not self._stop.is_set():
            try:
                asyncio.run(self._beat_on())
            except Exception:
                log.exception("the heartbeat stumbled; it begins again")
                time.sleep(1.0)
            finally:
                self._ready.set()

    async def _beat_on(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        while not self._stop.is_set():
            try:
                beats, close = await self._connect()
            except Exception as error:
                log.log(level_of(error), "no heartbeat: %s", error, exc_info=not isinstance(error, HoldfastError))
                await self._rest(min(1.0, self._interval))
                continue
            try:
                while not self._stop.is_set():
                    ok = await self._once(beats)
                    await self._rest(jitter(self._interval) if ok else min(1.0, self._interval / 4))
            finally:
                await close()

    async def _rest(self, seconds: float) -> None:
        assert self._stop is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    async def _once(self, beats: Beats) -> bool:
        """Beat for all that is held now; say whether the database answered."""
        claiming = self._holds.claiming
        holds = {hold.lease.id: hold for hold in self._holds.all()}
        requested = boottime()
        try:
            pulse = await beats.beat(self._worker, [hold.lease for hold in holds.values()], ttl=self._holds.ttl)
        except Exception as error:
            # Whatever it was, the next one may land; without a heartbeat every job of this worker is lost.
            log.log(level_of(error), "a heartbeat failed: %s", error, exc_info=not isinstance(error, HoldfastError))
            self._strangers.clear()
            return False
        yours = [(holds[beat.id], beat) for beat in pulse.jobs if beat.answer == "yours"]
        for listener in self._holds.renewed([hold for hold, _ in yours], requested):
            # Beside the heartbeat: whoever listens writes a file, and a disk may be slow or full.
            asyncio.get_running_loop().run_in_executor(None, listener, requested)
        heard = Heard(
            lost=tuple(holds[beat.id] for beat in pulse.jobs if beat.answer == "lost"),
            stops=tuple((hold, beat) for hold, beat in yours if beat.stop_request is not None),
            unknown=self._unknown(pulse, claiming),
            registered=pulse.registered,
            draining=pulse.draining,
        )
        if heard.lost or heard.stops or heard.unknown or heard.draining or not heard.registered:
            with contextlib.suppress(RuntimeError):
                self._main.call_soon_threadsafe(self._hear, heard)
        return True

    def _unknown(self, pulse: Pulse, claiming: bool) -> tuple[Beat, ...]:
        """Jobs that are ours by the database and unknown here, in two beats, with no claim under way at the second."""
        strangers = {
            (beat.id, beat.token): beat for beat in pulse.jobs if beat.answer == "unknown" and not self._knows(beat)
        }
        again = set() if claiming else self._strangers & strangers.keys()
        self._strangers = set(strangers)
        return tuple(strangers[key] for key in sorted(again))

    def _knows(self, beat: Beat) -> bool:
        hold = self._holds.get(beat.id)
        return hold is not None and hold.lease.token == beat.token
