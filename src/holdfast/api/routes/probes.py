"""Probes: whether the process lives, whether it can serve, and how it does."""

import os
import resource
import time
from collections.abc import Iterator

from starlette.responses import Response

from holdfast.api import VERSION
from holdfast.api.routing import Call, Reply, Routes, Service
from holdfast.api.shapes import Health, Ready
from holdfast.model import Role

routes = Routes()
TEXT = "text/plain; version=0.0.4; charset=utf-8"
STARTED = time.time()
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
    """Read the figures of this process, as Prometheus takes them."""
    return Response("\n".join(_lines(call.service)) + "\n", media_type=TEXT)


def _lines(service: Service) -> Iterator[str]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield from _metric("holdfast_info", "gauge", "This holdfast.", f'{{version="{VERSION}"}} 1')
    yield from _metric("process_start_time_seconds", "gauge", "When it started.", f" {STARTED:.3f}")
    yield from _metric("process_cpu_seconds_total", "counter", "CPU time.", f" {used.ru_utime + used.ru_stime:.3f}")
    yield from _metric("process_resident_memory_bytes", "gauge", "Memory now.", f" {_resident()}")
    yield from _metric("process_open_fds", "gauge", "Open files.", f" {len(os.listdir('/proc/self/fd'))}")
    requests = [
        f'{{method="{method}",route="{path}",status="{status}"}} {count}'
        for (method, path, status), count in sorted(service.requests.items())
    ]
    yield from _metric("holdfast_http_requests_total", "counter", "Requests answered.", *requests)
    hub, counters = service.hub, service.store.counters
    yield from _metric("holdfast_stream_followers", "gauge", "Clients that follow a job.", f" {hub.followers}")
    yield from _metric("holdfast_stream_looks_total", "counter", "Looks at all followed jobs.", f" {hub.looks}")
    yield from _metric("holdfast_stream_reads_total", "counter", "Blocks of events read.", f" {hub.reads}")
    yield from _metric("holdfast_store_deadlocks_total", "counter", "Deadlocks retried.", f" {counters.deadlocks}")


def _metric(name: str, kind: str, about: str, *values: str) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for value in values:
        yield name + value


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
