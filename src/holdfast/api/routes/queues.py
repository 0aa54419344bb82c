"""Queues: counts and caps; pausing and limits concern the whole installation, so they need an admin."""

import msgspec

from holdfast.api.request_types import EmptyBody, PatchQueue, QueueList
from holdfast.api.routing import Call, Reply, Routes
from holdfast.model import Queue, Role
from holdfast.response_types import Load, QueueView
from holdfast.store.queues import KEEP, loads_of

routes = Routes()
ONE = {200: QueueView}


@routes.add("GET", "/v1/queues", role=Role.VIEWER, answers={200: QueueList})
async def list_queues(call: Call) -> Reply:
    """List queues with their caps and job counts: of all tenants for an admin, else of the caller's tenant."""
    return Reply(QueueList(items=await _queues(call)))


@routes.add("POST", "/v1/queues/{queue:path}/pause", role=Role.ADMIN, answers=ONE)
async def pause_queue(call: Call, queue: str, body: EmptyBody) -> Reply:
    """Pause a queue: none of its jobs is claimed; running ones continue."""
    await call.store.queues.pause(queue, by=call.who.actor)
    return await _one(call, queue)


@routes.add("POST", "/v1/queues/{queue:path}/resume", role=Role.ADMIN, answers=ONE)
async def resume_queue(call: Call, queue: str, body: EmptyBody) -> Reply:
    """Resume a paused queue."""
    await call.store.queues.resume(queue, by=call.who.actor)
    return await _one(call, queue)


@routes.add("PATCH", "/v1/queues/{queue:path}", role=Role.ADMIN, answers=ONE)
async def patch_queue(call: Call, queue: str, body: PatchQueue) -> Reply:
    """Set how many jobs may run at once and how many may wait; null removes a limit, a missing field keeps it."""
    await call.store.queues.limit(
        queue,
        cap=KEEP if isinstance(body.max_running, msgspec.UnsetType) else body.max_running,
        depth=KEEP if isinstance(body.max_depth, msgspec.UnsetType) else body.max_depth,
        by=call.who.actor,
    )
    return await _one(call, queue)


async def _one(call: Call, queue: str) -> Reply:
    return Reply(next(view for view in await _queues(call) if view.queue == queue))


async def _queues(call: Call) -> list[QueueView]:
    recorded = {queue.queue: queue for queue in await call.store.queues.list()}
    counted = await call.service.depths.get()
    loads = loads_of(counted.depths, None if call.who.admin else call.tenant)
    views = []
    for name in sorted({*recorded, *loads}):
        queue = recorded.get(name) or Queue(queue=name, paused=False, cap=None, depth=None)
        counts = loads.get(name, Load())
        views.append(
            QueueView(queue=name, paused=queue.paused, max_running=queue.cap, max_depth=queue.depth, counts=counts)
        )
    return views
