"""Snapshots: list, show, use, remove."""

import msgspec
from starlette.concurrency import run_in_threadpool

from holdfast.api.request_types import (
    DeletedSnapshots,
    DeleteSnapshot,
    EmptyBody,
    ListSnapshots,
    SnapshotList,
    UsedSnapshot,
)
from holdfast.api.routing import Call, Reply, Routes
from holdfast.errors import NotFound
from holdfast.model import Role, Snapshot
from holdfast.pipeline.snapshots import SnapshotFolders

routes = Routes()


@routes.add("GET", "/v1/snapshots", role=Role.VIEWER, answers={200: SnapshotList})
async def list_snapshots(call: Call, query: ListSnapshots) -> Reply:
    """List snapshots, newest first."""
    page = await call.store.snapshots.list(tenant=call.tenant, limit=query.limit, cursor=query.cursor)
    totals = await call.store.snapshots.totals(tenant=call.tenant)
    return Reply(SnapshotList(items=page.items, next_cursor=page.next_cursor, totals=totals))


@routes.add("GET", "/v1/snapshots/{snapshot_id}", role=Role.VIEWER, answers={200: Snapshot})
async def get_snapshot(call: Call, snapshot_id: str) -> Reply:
    """Read a snapshot and what it depends on; a unique prefix of its id is enough."""
    return Reply(await call.store.snapshots.get(snapshot_id, tenant=call.tenant))


@routes.add("POST", "/v1/snapshots/{snapshot_id}/use", role=Role.SUBMITTER, answers={200: UsedSnapshot})
async def use_snapshot(call: Call, snapshot_id: str, body: EmptyBody) -> Reply:
    """Read a snapshot and record its use: a snapshot that was just used is not evicted."""
    found = await call.store.snapshots.get(snapshot_id, tenant=call.tenant)
    used = await call.store.snapshots.use([found.id], tenant=call.tenant)
    if found.id not in used:
        raise NotFound("snapshot", found.id)
    return Reply(UsedSnapshot(**msgspec.structs.asdict(used[found.id]), shared_folder=call.service.shared.id))


@routes.add("DELETE", "/v1/snapshots/{snapshot_id}", role=Role.OPERATOR, answers={200: DeletedSnapshots})
async def delete_snapshot(call: Call, snapshot_id: str, query: DeleteSnapshot) -> Reply:
    """Remove a snapshot; with `recurse`, also those made from it; with `force`, even if a job has it in its plan."""
    done = await call.store.snapshots.remove(
        snapshot_id,
        tenant=call.tenant,
        force=query.force,
        recurse=query.recurse,
        dry_run=query.dry_run,
        by=call.who.actor,
    )
    if done.outcome == "deleted":
        folders = SnapshotFolders.below(call.service.settings.shared)
        for snapshot in done.snapshots:
            await run_in_threadpool(folders.remove, snapshot.folder)
    return Reply(
        DeletedSnapshots(
            outcome=done.outcome,
            snapshots=[snapshot.id for snapshot in done.snapshots],
            size=sum(snapshot.size for snapshot in done.snapshots),
        )
    )
