"""Follows the engine's events: which containers of this installation have ended.

One stream serves all containers of a worker. It is a hint, and never proof: a handle that it wakes inspects its
container. While there is no stream, each container has a call of its own that waits for its end.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable

from holdfast.runner.base import EngineUnreachable
from holdfast.runner.docker.container import boottime
from holdfast.runner.docker.engine import Engine, EngineError
from holdfast.runner.docker.engine_watch import EngineWatch
from holdfast.timing import backoff, jitter

log = logging.getLogger(__name__)

OVERLAP = 10.0
"""Seconds before the opening of a stream from which it repeats ends: the engine opens it before it subscribes."""
STEADY = 10.0
"""A stream that lasted this long is reopened without a backoff."""


class EngineEvents:
    def __init__(self, engine: Engine, watch: EngineWatch, label: str) -> None:
        self._engine = engine
        self._watch = watch
        self._label = label
        self.open = False
        self._signals: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    async def follow(self) -> None:
        """Follow the events until cancelled, reconnecting when the stream breaks off."""
        n = 0
        while True:
            began = boottime()
            try:
                since = max(0.0, self._watch.clock.at(boottime()) - OVERLAP)
                async with contextlib.aclosing(self._engine.exits(self._label, since)) as exits:
                    async for container in exits:
                        self.open = True
                        if container is not None:
                            self._set(self._signals.get(container, ()))
            except (EngineUnreachable, EngineError) as error:
                log.info("the stream of the engine's events broke off, reconnecting: %s", error)
            finally:
                self._cut()
            n = n + 1 if boottime() - began < STEADY else 1
            await asyncio.sleep(jitter(backoff(n, base=0.1, cap=5.0)))

    def _cut(self) -> None:
        """Wake every handle: its container may have ended since the stream broke off."""
        self.open = False
        for signals in self._signals.values():
            self._set(signals)

    def _set(self, signals: Iterable[asyncio.Event]) -> None:
        for signal in signals:
            signal.set()

    def watch(self, container: str) -> asyncio.Event | None:
        """Return what is set when a container ends or the stream breaks off; None if there is no stream now.

        The caller inspects the container after this call, as it may have ended before.
        """
        if not self.open:
            return None
        signal = asyncio.Event()
        self._signals[container].add(signal)
        return signal

    def unwatch(self, container: str, signal: asyncio.Event | None) -> None:
        if signal is not None:
            self._signals[container].discard(signal)
            if not self._signals[container]:
                del self._signals[container]
