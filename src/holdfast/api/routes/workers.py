"""Workers: who runs what. To drain a host or to call it gone is an admin's."""

from holdfast.api.routing import Call, Reply, Routes
from holdfast.api.shapes import Drained, Nothing, Workers
from holdfast.model import Role
from holdfast.store.workers import Lost

routes = Routes()


@routes.add("GET", "/v1/workers", role=Role.VIEWER, answers={200: Workers})
async def list_workers(call: Call) -> Reply:
    """List workers; jobs are named to an admin, and to others if they are the tenant's."""
    tenant = None if call.who.admin else call.tenant
    return Reply(Workers(items=await call.store.workers.list(tenant=tenant)))


@routes.add("POST", "/v1/workers/{host:path}/lost", role=Role.ADMIN, answers={200: Lost})
async def lose_host(call: Call, host: str, body: Nothing) -> Reply:
    """Say that a host, or one domain, is gone: what ran there has stopped, and is settled as lost."""
    return Reply(await call.store.workers.lost(host, by=call.who.by))


@routes.add("POST", "/v1/workers/{host:path}/drain", role=Role.ADMIN, answers={200: Drained})
async def drain_host(call: Call, host: str, body: Nothing) -> Reply:
    """Ask every worker of a host to take nothing new and hand over."""
    return Reply(Drained(workers=await call.store.workers.drain_host(host)))
