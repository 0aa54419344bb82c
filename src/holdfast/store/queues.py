"""Queues: what an operator set for a named line of jobs, durably and over all workers."""

import time
from collections.abc import Mapping, Sequence
from enum import Enum
from operator import attrgetter

import msgspec

from holdfast.errors import Invalid
from holdfast.model import Queue
from holdfast.store.database import Database
from holdfast.store.wake import Wake, work
from holdfast.views import Load

CAPS_SECONDS = 1.0
COUNTED = 1000
MOST = 2_000_000_000


class Kept(Enum):
    """Says that a limit is to stay as it is."""

    KEEP = "keep"


KEEP = Kept.KEEP


class Depth(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs of a tenant wait in a queue, by gate, and run; for how long the oldest claimable one has waited.

    A tenant's jobs of one queue may be spread over several of these.
    """

    tenant: str
    queue: str
    open: int = 0
    future: int = 0
    needs: int = 0
    lane: int = 0
    held: int = 0
    unresolved: int = 0
    running: int = 0
    waited: float | None = None

    @property
    def waiting(self) -> int:
        return self.open + self.future + self.needs + self.lane + self.held + self.unresolved


_STATES = Load.__struct_fields__
_NOTHING = [0] * len(_STATES)
_counts_of = attrgetter(*_STATES)


def loads_of(depths: Sequence[Depth], tenant: str | None = None) -> dict[str, Load]:
    """Add up what waits and runs in each queue, of one tenant or of all."""
    found: dict[str, list[int]] = {}
    for depth in depths:
        if tenant in (None, depth.tenant):
            before = found.get(depth.queue, _NOTHING)
            found[depth.queue] = [a + b for a, b in zip(before, _counts_of(depth), strict=True)]
    return {queue: Load(**dict(zip(_STATES, counts, strict=True))) for queue, counts in sorted(found.items())}


def oldest_of(depths: Sequence[Depth], tenant: str | None = None) -> dict[str, float]:
    """For how many seconds the oldest claimable job of each queue had waited when it was counted."""
    found: dict[str, float] = {}
    for depth in depths:
        if depth.waited is not None and tenant in (None, depth.tenant):
            found[depth.queue] = max(found.get(depth.queue, 0.0), depth.waited)
    return found


class Queues:
    def __init__(self, database: Database, wake: Wake) -> None:
        self._database = database
        self._wake = wake
        self._caps: Mapping[str, int] = {}
        self._caps_until = 0.0

    async def pause(self, queue: str) -> None:
        """Let nobody claim from a queue; what runs goes on."""
        await self._database.rows("set_queue_paused", queue=queue, paused=True)

    async def resume(self, queue: str) -> None:
        await self._database.rows("set_queue_paused", queue=queue, paused=False)
        self._wake.post([work(queue)])

    async def limit(self, queue: str, *, cap: int | Kept | None = None, depth: int | Kept | None = None) -> None:
        """Set how many jobs may run at once and how many may wait; None lifts a limit, KEEP leaves it as it is.

        "At its cap" fails nothing: jobs wait. "At its depth" refuses a submit; submits that are open at the same moment
        may overshoot it.
        """
        for name, value in (("cap", cap), ("depth", depth)):
            if isinstance(value, int) and value < 1:
                raise Invalid(name, f"{value} is below 1; leave it out for no limit")
            if isinstance(value, int) and value > MOST:
                raise Invalid(name, f"{value} is over {MOST}; leave it out for no limit")
        await self._database.rows(
            "set_queue_limits",
            queue=queue,
            cap=cap if isinstance(cap, int) else None,
            depth_limit=depth if isinstance(depth, int) else None,
            keep_cap=cap is KEEP,
            keep_depth=depth is KEEP,
        )
        after: str | None = None
        while isinstance(depth, int):  # What waits already counts too.
            (step,) = await self._database.rows("count_waiting", queue=queue, after_id=after, scan=COUNTED)
            after = step["last_id"]
            if step["seen"] < COUNTED:
                break
        self._caps_until = 0.0
        self._wake.post([work(queue)])

    async def list(self) -> Sequence[Queue]:
        """Queues that an operator has touched."""
        rows = await self._database.read("list_queues")
        return [
            Queue(queue=row["queue"], paused=bool(row["paused"]), cap=row["cap"], depth=row["depth_limit"])
            for row in rows
        ]

    async def depths(self) -> Sequence[Depth]:
        """Count what waits and runs, exactly. With a million jobs that takes half a second: see `api.depths`."""
        waiting = await self._database.read_long("waiting_depths")
        running = await self._database.read("running_depths")
        return [Depth(**row) for row in (*waiting, *running)]

    async def loads(self, *, tenant: str | None = None) -> Mapping[str, Load]:
        """How much waits and runs in each queue that has any, of one tenant or of all."""
        return loads_of(await self.depths(), tenant)

    async def caps(self) -> Mapping[str, int]:
        """Queues with a cap, as known for up to a second: the claim itself takes nothing from one that is not here."""
        if time.monotonic() >= self._caps_until:
            rows = await self._database.read("list_queues")
            self._caps = {row["queue"]: row["cap"] for row in rows if row["cap"] is not None}
            self._caps_until = time.monotonic() + CAPS_SECONDS
        return self._caps
