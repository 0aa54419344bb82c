"""Workers and their jobs. Draining a host or reporting it as lost needs an admin."""

from holdfast.api.request_types import DrainedWorkers, EmptyBody, WorkerList
from holdfast.api.routing import Call, Reply, Routes
from holdfast.model import Role
from holdfast.store.workers import LostHost

routes = Routes()


@routes.add("GET", "/v1/workers", role=Role.VIEWER, answers={200: WorkerList})
async def list_workers(call: Call) -> Reply:
    """List workers; an admin sees all their jobs, other callers those of their tenant."""
    tenant = None if call.who.admin else call.tenant
    return Reply(WorkerList(items=await call.store.workers.list(tenant=tenant)))


@routes.add("POST", "/v1/workers/{host:path}/lost", role=Role.ADMIN, answers={200: LostHost})
async def lose_host(call: Call, host: str, body: EmptyBody) -> Reply:
    """Report that a host, or one domain, is gone and nothing runs there: its attempts are settled as lost."""
    return Reply(await call.store.workers.lost(host, by=call.who.actor))


@routes.add("POST", "/v1/workers/{host:path}/drain", role=Role.ADMIN, answers={200: DrainedWorkers})
async def drain_host(call: Call, host: str, body: EmptyBody) -> Reply:
    """Ask every worker of a host to drain: claim nothing more and hand over."""
    return Reply(DrainedWorkers(workers=await call.store.workers.drain_host(host, by=call.who.actor)))
