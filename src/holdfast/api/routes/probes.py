"""Probes: whether the process lives, whether it can serve, and how it does."""

from starlette.responses import Response

from holdfast.api.metrics import exposition
from holdfast.api.routing import Call, Reply, Routes
from holdfast.api.shapes import Health, Ready
from holdfast.model import Role

routes = Routes()
TEXT = "text/plain; version=0.0.4; charset=utf-8"
ALONE = "no worker lives: jobs are accepted and wait; start one with `holdfast worker`"


@routes.add("GET", "/healthz", role=None, answers={200: Health})
async def health(call: Call) -> Reply:
    """Say that the process lives."""
    return Reply(Health(status="ok"))


@routes.add("GET", "/readyz", role=None, answers={200: Ready})
async def ready(call: Call) -> Reply:
    """Say whether the database answers, and how many workers live."""
    live = sum(worker.live for worker in await call.store.workers.list())
    return Reply(Ready(status="ready", workers=live, warnings=() if live else (ALONE,)))


@routes.add("GET", "/metrics", role=Role.VIEWER, answers={200: str}, media=TEXT)
async def metrics(call: Call) -> Response:
    """Read the figures of the installation and of this process, as Prometheus takes them."""
    tenant = None if call.who.admin else call.tenant
    return Response(await exposition(call.service, tenant), media_type=TEXT)
