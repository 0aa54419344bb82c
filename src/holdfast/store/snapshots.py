"""Snapshots: found by id, built by one lease at a time, published by that lease only, removed when unused.

A build lock names the lease of its builder and is valid only as long as that lease, so it needs no timeout and no
clean-up. The lock only avoids duplicate work; `publish` decides, and a lost lease cannot publish. Folders belong to
the caller: after a refusal or a removal the caller removes the folder, or the sweep does.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from holdfast import decoding
from holdfast.errors import Invalid, NotFound, SnapshotInUse
from holdfast.model import Lease, Outputs, Snapshot
from holdfast.store.audit import By, record
from holdfast.store.database import Database, Row, Tx
from holdfast.store.rows import to_json
from holdfast.timing import from_micros, to_micros

NEAR = 200
ID_LENGTH = 64
SHOWN = 5
BEYOND = "g"
"""The first letter that sorts after every hexadecimal digit of an id."""


Published = Literal["published", "exists", "lost", "refused"]


class NewSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A folder on the disk that is about to be published as a snapshot."""

    id: str
    parent: str
    task: str
    task_hash: str
    components: Mapping[str, str]
    folder: str
    digest: str
    size: int
    outputs: Outputs = Outputs()


class BuildClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request for a build lock.

    `built`: the snapshot exists. `yours`: build it. `busy`: `job` is building it; ask again. `lost`: the lease is gone.
    """

    answer: Literal["built", "yours", "busy", "lost"]
    job: str | None = None


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed, or would be: the caller removes the folders."""

    outcome: Literal["deleted", "would_delete"]
    snapshots: tuple[Snapshot, ...]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    size: int


class SnapshotPage(msgspec.Struct, frozen=True, kw_only=True):
    items: Sequence[Snapshot]
    next_cursor: str | None


class Snapshots:
    def __init__(self, database: Database) -> None:
        self._database = database

    # Finding

    async def existing(self, ids: Sequence[str], *, tenant: str) -> Mapping[str, Snapshot]:
        """Return the snapshots that exist among these ids; those of other tenants are left out."""
        rows = await self._database.read("existing_snapshots", ids=list(ids), tenant=tenant)
        return {row["id"]: to_snapshot(row) for row in rows}

    async def use(self, ids: Sequence[str], *, tenant: str) -> Mapping[str, Snapshot]:
        """Like `existing`, and record that they are used now: a snapshot that was just used is not evicted."""
        rows = await self._database.rows("use_snapshots", ids=list(ids), tenant=tenant)
        return {row["id"]: to_snapshot(row) for row in rows}

    async def near(self, parents: Sequence[str], *, tenant: str) -> Sequence[Snapshot]:
        """Return snapshots to compare a cache miss with: those with one of these parents, then the tenant's newest."""
        rows = await self._database.read("near_snapshots", parents=list(parents), tenant=tenant, limit=NEAR)
        return [to_snapshot(row) for row in rows]

    async def get(self, text: str, *, tenant: str) -> Snapshot:
        """Return the one snapshot whose id is, or begins with, `text`."""
        if not re.fullmatch(rf"[0-9a-f]{{1,{ID_LENGTH}}}", text):
            raise NotFound("snapshot", text[:80])
        rows = await self._database.read(
            "snapshots_between", least=text, most=text + BEYOND, tenant=tenant, limit=SHOWN + 1
        )
        if not rows:
            raise NotFound("snapshot", text)
        if len(rows) > 1:
            several = ", ".join(row["id"] for row in rows[:SHOWN])
            raise Invalid("id", f"several snapshots' ids begin with {text}: {several}")
        return to_snapshot(rows[0])

    async def list(self, *, tenant: str, limit: int = 100, cursor: str | None = None) -> SnapshotPage:
        """List snapshots, newest first."""
        if not 1 <= limit <= 1000:
            raise Invalid("limit", f"{limit} is not between 1 and 1000")
        before_at, before_id = _read_cursor(cursor)
        rows = await self._database.read(
            "list_snapshots", tenant=tenant, before_at=before_at, before_id=before_id, limit=limit + 1
        )
        items = [to_snapshot(row) for row in rows[:limit]]
        return SnapshotPage(items=items, next_cursor=_cursor(items[-1]) if len(rows) > limit else None)

    async def totals(self, *, tenant: str | None = None) -> Totals:
        """Return the number of snapshots and their total size, for one tenant or for all."""
        (row,) = await self._database.read("snapshot_totals", tenant=tenant)
        return Totals(count=row["count"], size=row["size"])

    async def stored_folders(self, folders: Sequence[str]) -> frozenset[str]:
        """Return which of these folders belong to a snapshot."""
        rows = await self._database.read("stored_folders", folders=list(folders))
        return frozenset(row["folder"] for row in rows)

    async def outputs(self, snapshot: Snapshot) -> Outputs | None:
        """Read the outputs of the tasks up to a snapshot; None if the version that made it recorded no outputs."""
        rows = await self._database.read("snapshot_outputs", id=snapshot.id, folder=snapshot.folder)
        if not rows:
            raise NotFound("snapshot", snapshot.id)
        text = rows[0]["outputs"]
        return None if text is None else decoding.decode(text, Outputs)

    # Building

    async def take(self, lease: Lease, snapshot: str) -> BuildClaim:
        """Ask for the build lock of a snapshot. Its holder keeps the lock exactly as long as its lease."""

        async def change(tx: Tx) -> BuildClaim:
            await tx.rows("lock_build", id=snapshot)
            (state,) = await tx.rows("build_state", id=snapshot, tenant=lease.tenant)
            if state["built"]:
                await _leave(tx, lease, snapshot)
                return BuildClaim(answer="built")
            if state["live"] and (state["job_id"], state["token"]) != (lease.id, lease.token):
                return BuildClaim(answer="busy", job=state["job_id"])
            if not await tx.rows("lock_lease", id=lease.id, token=lease.token):
                await _leave(tx, lease, snapshot)
                return BuildClaim(answer="lost")
            await tx.rows("take_build", id=snapshot, job_id=lease.id, token=lease.token)
            return BuildClaim(answer="yours")

        return await self._database.transact(change)

    async def release(self, lease: Lease, snapshot: str) -> None:
        """Release the build lock, so that another job can build the snapshot."""
        await self._database.rows("release_build", id=snapshot, job_id=lease.id, token=lease.token)

    async def publish(self, lease: Lease, new: NewSnapshot) -> Published:
        """Publish a folder as the snapshot, unless another folder already is or the lease was lost.

        `refused`: the job has no recorded task that produces this snapshot. Unless the answer is `published`, the
        caller removes the folder.
        """

        async def change(tx: Tx) -> Published:
            await tx.rows("lock_build", id=new.id)
            (state,) = await tx.rows("build_state", id=new.id, tenant=lease.tenant)
            refused = False
            mine = (state["job_id"], state["token"]) == (lease.id, lease.token)
            if mine and not state["built"] and await tx.rows("lock_lease", id=lease.id, token=lease.token):
                fields = msgspec.structs.asdict(new)
                fields["outputs"] = msgspec.json.encode(new.outputs).decode()
                made = {"tenant": lease.tenant, "job_id": lease.id, "token": lease.token, **fields}
                refused = not await tx.rows("publish_snapshot", **made)
            await _leave(tx, lease, new.id)
            # Our own publish may have succeeded earlier with only its reply lost.
            existing = await tx.rows("existing_snapshots", ids=[new.id], tenant=lease.tenant)
            if not existing:
                return "refused" if refused else "lost"
            return "published" if existing[0]["folder"] == new.folder else "exists"

        return await self._database.transact(change)

    async def prune_builds(self, age: float) -> int:
        """Delete build locks whose lease ended at least `age` seconds ago; return how many."""
        return len(await self._database.rows("prune_builds", age=age))

    # Removing

    async def remove(
        self,
        text: str,
        *,
        tenant: str,
        force: bool = False,
        recurse: bool = False,
        dry_run: bool = False,
        by: By = None,
    ) -> Removal:
        """Remove a snapshot; with `recurse`, also those made from it; with `force`, even if a job has it in its plan.

        Such a job then builds the snapshot again.
        """
        found = (await self.get(text, tenant=tenant)).id

        async def change(tx: Tx) -> Removal:
            family = [row["id"] for row in await tx.rows("snapshot_descendants", id=found, tenant=tenant)]
            locked = [to_snapshot(row) for row in await tx.rows("lock_snapshots", ids=family)]
            if found not in {snapshot.id for snapshot in locked}:
                raise NotFound("snapshot", found)
            children = [snapshot.id for snapshot in locked if snapshot.parent == found]
            if children and not recurse:
                raise SnapshotInUse(
                    found, f"has snapshots made from it ({len(children)}); remove them too with recurse"
                )
            users = [] if force else await tx.rows("snapshot_users", ids=family)
            if users:
                raise SnapshotInUse(
                    users[0]["snapshot"], f"is in the plan of job {users[0]['job_id']}; wait for it, or force"
                )
            if not dry_run:
                await tx.rows("remove_snapshots", ids=[snapshot.id for snapshot in locked])
                after = {"removed": len(locked), "force": force}
                await record(tx, by, "snapshot.remove", found, tenant=tenant, after=after)
            return Removal(outcome="would_delete" if dry_run else "deleted", snapshots=tuple(locked))

        return await self._database.transact(change)

    async def drop(self, snapshot: Snapshot) -> bool:
        """Delete the row of a snapshot whose folder is damaged, unless its id has another folder by now."""

        async def change(tx: Tx) -> bool:
            locked = await tx.rows("lock_snapshots", ids=[snapshot.id])
            if not locked or locked[0]["folder"] != snapshot.folder:
                return False
            await tx.rows("remove_snapshots", ids=[snapshot.id])
            return True

        return await self._database.transact(change)

    async def evict(self, *, grace: float) -> Snapshot | None:
        """Remove one snapshot: a leaf in no job's plan, the oldest, then the largest. None if all must stay.

        Snapshots that were made or used within `grace` seconds are never removed.
        """
        for row in await self._database.read("evictable_snapshots", grace=grace, limit=SHOWN):
            gone = await self._evict(row["id"], grace)
            if gone is not None:
                return gone
        return None

    async def _evict(self, snapshot: str, grace: float) -> Snapshot | None:
        async def change(tx: Tx) -> Snapshot | None:
            locked = await tx.rows("lock_snapshots", ids=[snapshot])
            # A job that plans with a snapshot records its use under this lock.
            if not locked or not await tx.rows("unused_snapshots", ids=[snapshot], grace=grace):
                return None
            await tx.rows("remove_snapshots", ids=[snapshot])
            return to_snapshot(locked[0])

        return await self._database.transact(change)


async def _leave(tx: Tx, lease: Lease, snapshot: str) -> None:
    """Delete the build lock if it is ours or has no holder."""
    await tx.rows("release_build", id=snapshot, job_id=lease.id, token=lease.token)


def to_snapshot(row: Row) -> Snapshot:
    return Snapshot(
        id=row["id"],
        tenant=row["tenant"],
        parent=row["parent"],
        task=row["task"],
        task_hash=row["task_hash"],
        components=to_json(row["components"], {}),
        folder=row["folder"],
        digest=row["digest"],
        size=row["size"],
        made_at=row["made_at"],
        used_at=row["used_at"],
        job_id=row["job_id"],
    )


def _cursor(snapshot: Snapshot) -> str:
    return base64.urlsafe_b64encode(f"{to_micros(snapshot.made_at)}.{snapshot.id}".encode()).decode()


def _read_cursor(cursor: str | None) -> tuple[datetime | None, str | None]:
    if cursor is None:
        return None, None
    try:
        micros, _, snapshot = base64.urlsafe_b64decode(cursor.encode()).decode().partition(".")
        return from_micros(int(micros)), snapshot
    except (ValueError, binascii.Error, OverflowError):
        raise Invalid("cursor", "is not a valid cursor") from None
