"""Queues: an operator's settings for a named set of jobs, durable and valid for all workers."""

import time
from collections.abc import Mapping, Sequence
from enum import Enum
from operator import attrgetter

import msgspec

from holdfast.errors import Invalid
from holdfast.model import Queue
from holdfast.response_types import Load
from holdfast.store.audit import By, record
from holdfast.store.database import Database, Row, Tx
from holdfast.store.notify import Notifications, work_topic

CAPS_SECONDS = 1.0
COUNTED = 1000
MOST = 2_000_000_000


class Unchanged(Enum):
    """Marks a limit that is not to be changed."""

    KEEP = "keep"


KEEP = Unchanged.KEEP


class Depth(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs of a tenant wait in a queue, by gate, and run; how long the oldest claimable one has waited.

    The jobs of one tenant and queue may be spread over several of these.
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
    """Sum the waiting and running jobs of each queue, of one tenant or of all."""
    found: dict[str, list[int]] = {}
    for depth in depths:
        if tenant in (None, depth.tenant):
            before = found.get(depth.queue, _NOTHING)
            found[depth.queue] = [a + b for a, b in zip(before, _counts_of(depth), strict=True)]
    return {queue: Load(**dict(zip(_STATES, counts, strict=True))) for queue, counts in sorted(found.items())}


def oldest_of(depths: Sequence[Depth], tenant: str | None = None) -> dict[str, float]:
    """Return how many seconds the oldest claimable job of each queue had waited when it was counted."""
    found: dict[str, float] = {}
    for depth in depths:
        if depth.waited is not None and tenant in (None, depth.tenant):
            found[depth.queue] = max(found.get(depth.queue, 0.0), depth.waited)
    return found


def _settings_of(rows: Sequence[Row]) -> dict[str, int | bool | None]:
    """Return the settings of a queue under the names of the HTTP API; a queue without settings has no row."""
    if not rows:
        return {"paused": False, "max_running": None, "max_depth": None}
    return {"paused": bool(rows[0]["paused"]), "max_running": rows[0]["cap"], "max_depth": rows[0]["depth_limit"]}


class Queues:
    def __init__(self, database: Database, notifications: Notifications) -> None:
        self._database = database
        self._notifications = notifications
        self._caps: Mapping[str, int] = {}
        self._caps_until = 0.0

    async def pause(self, queue: str, *, by: By = None) -> None:
        """Stop claims from a queue; running jobs continue."""
        await self._set(queue, by, "queue.pause", "set_queue_paused", paused=True)

    async def resume(self, queue: str, *, by: By = None) -> None:
        await self._set(queue, by, "queue.resume", "set_queue_paused", paused=False)
        self._notifications.post([work_topic(queue)])

    async def _set(self, queue: str, by: By, action: str, statement: str, **values: int | bool | None) -> None:
        """Change the settings of a queue, and record it in the same transaction if anything changed."""

        async def change(tx: Tx) -> None:
            before = _settings_of(await tx.rows("lock_queue", queue=queue))
            await tx.rows(statement, queue=queue, **values)
            after = _settings_of(await tx.rows("lock_queue", queue=queue))
            if before != after:
                await record(tx, by, action, queue, before=before, after=after)

        await self._database.transact(change)

    async def limit(
        self, queue: str, *, cap: int | Unchanged | None = None, depth: int | Unchanged | None = None, by: By = None
    ) -> None:
        """Set how many jobs may run at once and how many may wait; None removes a limit, KEEP leaves it as it is.

        At the cap, jobs wait. At the depth limit, a submit is refused; concurrent submits may exceed the limit.
        """
        for name, value in (("cap", cap), ("depth", depth)):
            if isinstance(value, int) and value < 1:
                raise Invalid(name, f"{value} is below 1; leave it out for no limit")
            if isinstance(value, int) and value > MOST:
                raise Invalid(name, f"{value} is over {MOST}; leave it out for no limit")
        await self._set(
            queue,
            by,
            "queue.limit",
            "set_queue_limits",
            cap=cap if isinstance(cap, int) else None,
            depth_limit=depth if isinstance(depth, int) else None,
            keep_cap=cap is KEEP,
            keep_depth=depth is KEEP,
        )
        after: str | None = None
        while isinstance(depth, int):  # Jobs that already wait count too.
            (step,) = await self._database.rows("count_waiting", queue=queue, after_id=after, scan=COUNTED)
            after = step["last_id"]
            if step["scanned"] < COUNTED:
                break
        self._caps_until = 0.0
        self._notifications.post([work_topic(queue)])

    async def list(self) -> Sequence[Queue]:
        """Return the queues that have settings."""
        rows = await self._database.read("list_queues")
        return [
            Queue(queue=row["queue"], paused=bool(row["paused"]), cap=row["cap"], depth=row["depth_limit"])
            for row in rows
        ]

    async def depths(self) -> Sequence[Depth]:
        """Count waiting and running jobs exactly. With a million jobs that takes half a second: see `api.depths`."""
        waiting = await self._database.read_long("waiting_depths")
        running = await self._database.read("running_depths")
        return [Depth(**row) for row in (*waiting, *running)]

    async def loads(self, *, tenant: str | None = None) -> Mapping[str, Load]:
        """Return how many jobs wait and run in each queue that has any, of one tenant or of all."""
        return loads_of(await self.depths(), tenant)

    async def caps(self) -> Mapping[str, int]:
        """Return queues with a cap, cached for up to a second: the claim statement skips capped queues missing here."""
        if time.monotonic() >= self._caps_until:
            rows = await self._database.read("list_queues")
            self._caps = {row["queue"]: row["cap"] for row in rows if row["cap"] is not None}
            self._caps_until = time.monotonic() + CAPS_SECONDS
        return self._caps
