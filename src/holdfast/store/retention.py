"""Retention: which ended jobs go, and how much there is of everything, without counting what is large."""

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.errors import Invalid
from holdfast.model import TERMINAL, Status
from holdfast.store.database import Database
from holdfast.store.files import Files, NoFiles
from holdfast.store.rows import to_json

SCAN = 1000
MOST = 10_001


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """What may go: jobs that ended longer ago than the age of their status; all but the newest of one signature.

    `grace` protects what has just ended, whatever the other rules say. Durations are seconds.
    """

    ages: Mapping[Status, float] = {}
    newest: int | None = None
    grace: float = 60.0

    def __post_init__(self) -> None:
        for status, age in self.ages.items():
            if status not in TERMINAL:
                raise Invalid("ages", f"{status} jobs have not ended; ages are for {', '.join(sorted(TERMINAL))}")
            if age < 0:
                raise Invalid("ages", f"{age} is not a duration")
        if self.newest is not None and self.newest < 1:
            raise Invalid("newest", f"{self.newest} is below 1; leave it out to keep all")


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a prune: what it removed, and where the next one begins; None when all has been looked at."""

    removed: Sequence[str]
    next_after: str | None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs by gate, exact up to 10,000 (10,001 stands for more), what runs, and an estimate of all jobs."""

    open: int
    future: int
    needs: int
    lane: int
    held: int
    unresolved: int
    running: int
    total: int


class Retain:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.files: Files = NoFiles()

    async def prune(self, retention: Retention, *, after: str | None = None, scan: int = SCAN) -> Pruned:
        """Take one bounded step along all jobs, oldest first, and remove what may go.

        Jobs are first marked for deletion, then their files go, and their rows last: what a crash interrupts, or a file
        that cannot be removed, is finished by `Jobs.purge`. With `newest`, jobs are signed on the way: what a first
        pass could not compare yet, the next one removes.
        """
        if retention.newest is not None:
            await self._database.rows("sign", after_id=after, scan=scan)
        rows = await self._database.rows(
            "prune",
            after_id=after,
            scan=scan,
            grace=retention.grace,
            ages={status.value: age for status, age in retention.ages.items()},
            newest=retention.newest,
        )
        if not rows:
            return Pruned(removed=(), next_after=None)
        row = rows[0]
        doomed = to_json(row["doomed"], [])
        gone = await self.files.remove(doomed) if doomed else ()
        removed = await self._database.rows("delete_jobs", ids=sorted(gone)) if gone else ()
        return Pruned(
            removed=[one["id"] for one in removed], next_after=row["last_id"] if row["seen"] == scan else None
        )

    async def forget_keys(self, limit: int = 1000) -> int:
        """Forget idempotency keys whose 24 hours are over; return how many."""
        return len(await self._database.rows("forget_keys", limit=limit))

    async def forget_lanes(self, limit: int = 1000) -> int:
        """Forget lanes that are idle, and that nobody has said anything about; return how many.

        Whoever comes next makes such a lane again.
        """
        return len(await self._database.rows("forget_lanes", limit=limit))

    async def counts(self) -> Counts:
        (row,) = await self._database.read("counts", most=MOST)
        return Counts(**{name: int(row[name]) for name in Counts.__struct_fields__})
