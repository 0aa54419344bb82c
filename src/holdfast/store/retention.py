"""Retention: which ended jobs are removed; and job counts that do not scan large tables."""

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
    """What may be removed: jobs that ended longer ago than their status's age; all but the newest of one signature.

    `grace` protects jobs that have just ended, whatever the other rules say. Durations are seconds.
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
    """One step of a prune: what it removed, and where the next step starts; None after the last job."""

    removed: Sequence[str]
    next_after: str | None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting jobs by gate, exact up to 10,000 (10,001 means more), running jobs, and an estimate of all jobs."""

    open: int
    future: int
    needs: int
    lane: int
    held: int
    unresolved: int
    running: int
    total: int


class Pruning:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.files: Files = NoFiles()

    async def prune(self, retention: Retention, *, after: str | None = None, scan: int = SCAN) -> Pruned:
        """Take one bounded step along all jobs, oldest first, and remove those that may be removed.

        Jobs are first marked for deletion, then their files are removed, and their rows last: after a crash, or when a
        file cannot be removed, `Jobs.finish_deletions` continues. With `newest`, the signatures of jobs are computed on
        the way: jobs that a first pass could not compare yet are removed by the next one.
        """
        if retention.newest is not None:
            await self._database.rows("set_signatures", after_id=after, scan=scan)
        rows = await self._database.rows(
            "prune_jobs",
            after_id=after,
            scan=scan,
            grace=retention.grace,
            ages={status.value: age for status, age in retention.ages.items()},
            newest=retention.newest,
        )
        if not rows:
            return Pruned(removed=(), next_after=None)
        row = rows[0]
        to_delete = to_json(row["to_delete"], [])
        gone = await self.files.remove(to_delete) if to_delete else ()
        removed = await self._database.rows("delete_jobs", ids=sorted(gone)) if gone else ()
        return Pruned(
            removed=[one["id"] for one in removed], next_after=row["last_id"] if row["scanned"] == scan else None
        )

    async def prune_keys(self, limit: int = 1000) -> int:
        """Delete idempotency keys that are older than 24 hours; return how many."""
        return len(await self._database.rows("prune_idempotency_keys", limit=limit))

    async def prune_lanes(self, limit: int = 1000) -> int:
        """Delete lanes that are idle and have no settings; return how many.

        The next job creates such a lane again.
        """
        return len(await self._database.rows("prune_lanes", limit=limit))

    async def counts(self) -> Counts:
        (row,) = await self._database.read("count_jobs", most=MOST)
        return Counts(**{name: int(row[name]) for name in Counts.__struct_fields__})
