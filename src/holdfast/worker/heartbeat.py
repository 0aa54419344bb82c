"""The heartbeat: renews all leases of a worker in one statement, from a thread with a connection of its own.

User code that blocks the event loop, a slow slot or a burst of work cannot starve it. It retries while the database is
unavailable, and passes the answers to the worker's loop: lost leases, stop requests, a drain request, and leases that
the database has for us but that we do not know.
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
from holdfast.model import Beat, HeartbeatReply, Lease
from holdfast.store.outage import level_of
from holdfast.timing import jitter
from holdfast.worker.held_leases import HeldLease, HeldLeases, boottime

log = logging.getLogger(__name__)


class HeartbeatStore(Protocol):
    async def beat(self, worker: str, leases: list[Lease], *, ttl: float) -> HeartbeatReply: ...


class HeartbeatResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of one heartbeat, for the worker's loop to act on."""

    lost: tuple[HeldLease, ...]
    stops: tuple[tuple[HeldLease, Beat], ...]
    unknown: tuple[Beat, ...]
    registered: bool
    draining: bool


class Heartbeat:
    """Renews leases until it is stopped. `connect` is called in the thread, on the thread's own event loop."""

    def __init__(
        self,
        worker: str,
        held_leases: HeldLeases,
        *,
        interval: float,
        connect: Callable[[], Awaitable[tuple[HeartbeatStore, Callable[[], Awaitable[None]]]]],
        on_result: Callable[[HeartbeatResult], None],
    ) -> None:
        self._worker = worker
        self._held_leases = held_leases
        self._interval = interval
        self._connect = connect
        self._on_result = on_result
        self._main = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._strangers: set[tuple[str, int]] = set()
        self._thread = threading.Thread(target=self._run, name="holdfast-heart", daemon=True)

    async def __aenter__(self) -> "Heartbeat":
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
                asyncio.run(self._beat_loop())
            except Exception:
                log.exception("heartbeat thread failed; restarting it")
                time.sleep(1.0)
            finally:
                self._ready.set()

    async def _beat_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        while not self._stop.is_set():
            try:
                beats, close = await self._connect()
            except Exception as error:
                log.log(
                    level_of(error),
                    "heartbeat cannot connect, retrying: %s",
                    error,
                    exc_info=not isinstance(error, HoldfastError),
                )
                await self._sleep(min(1.0, self._interval))
                continue
            try:
                while not self._stop.is_set():
                    ok = await self._once(beats)
                    await self._sleep(jitter(self._interval) if ok else min(1.0, self._interval / 4))
            finally:
                await close()

    async def _sleep(self, seconds: float) -> None:
        assert self._stop is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    async def _once(self, beats: HeartbeatStore) -> bool:
        """Renew all leases held now; return whether the database answered."""
        claiming = self._held_leases.claiming
        held_leases = {held.lease.id: held for held in self._held_leases.all()}
        requested = boottime()
        try:
            pulse = await beats.beat(
                self._worker, [held.lease for held in held_leases.values()], ttl=self._held_leases.ttl
            )
        except Exception as error:
            # The next beat may succeed. Without a heartbeat every lease of this worker is lost.
            log.log(
                level_of(error), "heartbeat failed, retrying: %s", error, exc_info=not isinstance(error, HoldfastError)
            )
            self._strangers.clear()
            return False
        yours = [(held_leases[beat.id], beat) for beat in pulse.jobs if beat.answer == "yours"]
        for listener in self._held_leases.renewed([held for held, _ in yours], requested):
            # In another thread: the callbacks write files, and a disk may be slow or full.
            asyncio.get_running_loop().run_in_executor(None, listener, requested)
        result = HeartbeatResult(
            lost=tuple(held_leases[beat.id] for beat in pulse.jobs if beat.answer == "lost"),
            stops=tuple((held, beat) for held, beat in yours if beat.stop_request is not None),
            unknown=self._unknown(pulse, claiming),
            registered=pulse.registered,
            draining=pulse.draining,
        )
        if result.lost or result.stops or result.unknown or result.draining or not result.registered:
            with contextlib.suppress(RuntimeError):
                self._main.call_soon_threadsafe(self._on_result, result)
        return True

    def _unknown(self, pulse: HeartbeatReply, claiming: bool) -> tuple[Beat, ...]:
        """Return leases that were unknown here in two consecutive beats, with no claim in progress at the second."""
        strangers = {
            (beat.id, beat.token): beat for beat in pulse.jobs if beat.answer == "unknown" and not self._knows(beat)
        }
        again = set() if claiming else self._strangers & strangers.keys()
        self._strangers = set(strangers)
        return tuple(strangers[key] for key in sorted(again))

    def _knows(self, beat: Beat) -> bool:
        held = self._held_leases.get(beat.id)
        return held is not None and held.lease.token == beat.token
