"""Lanes: which job is next, what blocks a lane, and whether it is paused."""

from holdfast.api.request_types import EmptyBody, LaneList, ListLanes, PutLane
from holdfast.api.routing import Call, Reply, Routes
from holdfast.errors import Forbidden
from holdfast.model import Lane, Role

routes = Routes()
ONE = {200: Lane}


@routes.add("GET", "/v1/lanes", role=Role.VIEWER, answers={200: LaneList})
async def list_lanes(call: Call, query: ListLanes) -> Reply:
    """List lanes by name."""
    found = await call.store.lanes.list(tenant=call.tenant, after=query.cursor, limit=query.limit)
    return Reply(LaneList(items=found, next_cursor=found[-1].lane if len(found) == query.limit else None))


@routes.add("POST", "/v1/lanes/{lane:path}/pause", role=Role.OPERATOR, answers=ONE)
async def pause_lane(call: Call, lane: str, body: EmptyBody) -> Reply:
    """Pause a lane: none of its jobs is claimed; a running one continues."""
    return Reply(await call.store.lanes.pause(lane, tenant=call.tenant, by=call.who.actor))


@routes.add("POST", "/v1/lanes/{lane:path}/resume", role=Role.OPERATOR, answers=ONE)
async def resume_lane(call: Call, lane: str, body: EmptyBody) -> Reply:
    """Resume a paused lane."""
    return Reply(await call.store.lanes.resume(lane, tenant=call.tenant, by=call.who.actor))


@routes.add("GET", "/v1/lanes/{lane:path}", role=Role.VIEWER, answers=ONE)
async def get_lane(call: Call, lane: str) -> Reply:
    """Read a lane: its state, head, blocking jobs, depth and readiness check."""
    return Reply(await call.store.lanes.get(lane, tenant=call.tenant))


@routes.add("PUT", "/v1/lanes/{lane:path}", role=Role.OPERATOR, answers=ONE)
async def put_lane(call: Call, lane: str, body: PutLane) -> Reply:
    """Set the readiness check of a lane; null removes it. A check is a command, so setting one needs an admin."""
    if body.check is not None and not (call.who.admin or call.service.settings.allow_raw):
        raise Forbidden("a readiness check is a command of your own: it needs an admin's token or HOLDFAST_ALLOW_RAW")
    check = None if body.check is None else {"command": body.check.command, "timeout": body.check.timeout}
    return Reply(await call.store.lanes.set_check(lane, check, tenant=call.tenant, by=call.who.actor))
