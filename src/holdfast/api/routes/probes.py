"""Probes: liveness, readiness and metrics."""

from starlette.responses import Response

from holdfast.api.metrics import exposition
from holdfast.api.request_types import Health, Ready
from holdfast.api.routing import Call, Reply, Routes
from holdfast.model import Role

routes = Routes()
TEXT = "text/plain; version=0.0.4; charset=utf-8"
ALONE = "no live worker: jobs are accepted and wait; start one with `holdfast worker`"


@routes.add("GET", "/healthz", role=None, answers={200: Health})
async def health(call: Call) -> Reply:
    """Report that the process is alive."""
    return Reply(Health(status="ok"))


@routes.add("GET", "/readyz", role=None, answers={200: Ready})
async def ready(call: Call) -> Reply:
    """Report whether jobs can be accepted (the database accepts a write, its disk has space) and the live workers.

    503 `not_ready` says why not. The write is tested at most once a second.
    """
    warnings = await call.service.readiness.check()
    live = sum(worker.live for worker in await call.store.workers.list())
    return Reply(Ready(status="ready", workers=live, warnings=(*warnings, *(() if live else (ALONE,)))))


@routes.add("GET", "/metrics", role=Role.VIEWER, answers={200: str}, media=TEXT)
async def metrics(call: Call) -> Response:
    """Read the metrics of the installation and of this process, in Prometheus' format."""
    tenant = None if call.who.admin else call.tenant
    return Response(await exposition(call.service, tenant), media_type=TEXT)
