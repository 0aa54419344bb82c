"""The content of `/metrics`: the queues as they are now, the counters of every worker, and this server itself."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.api import VERSION
from holdfast.api.depths import QueueCounts
from holdfast.api.routing import ServiceState
from holdfast.model import WorkerRecord
from holdfast.store.database import Counters
from holdfast.store.queues import loads_of, oldest_of

STATUS = {"held": "pending", "running": "running"}
"""The status of jobs at a gate; at all others a job is queued."""
COUNTED = Counters.help_texts()
SERVER = "server"
DEPARTED = "departed"
"""The label of all workers that are gone: the sum over all workers never decreases."""


async def exposition(service: ServiceState, tenant: str | None) -> bytes:
    """Return the metrics in Prometheus' format, for one tenant's jobs or for all."""
    counted = await service.depths.get()
    workers = await service.store.workers.list(tenant=tenant)
    totals = await service.store.workers.totals()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(
        _GatheredMetrics([*_queues(counted, tenant), *_workers(service, workers, totals), *_server(service)])
    )
    return generate_latest(registry)


class _GatheredMetrics(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _queues(counted: QueueCounts, tenant: str | None) -> Iterator[Metric]:
    age = counted.age
    yield GaugeMetricFamily("holdfast_jobs_age_seconds", "How long ago jobs were counted: at most 10 s.", value=age)
    loads, oldest = loads_of(counted.depths, tenant), oldest_of(counted.depths, tenant)
    jobs = GaugeMetricFamily("holdfast_jobs", "Jobs that have not ended.", labels=["queue", "status", "gate"])
    for queue, load in loads.items():
        for gate in load.__struct_fields__:
            jobs.add_metric([queue, STATUS.get(gate, "queued"), gate], getattr(load, gate))
    yield jobs
    waited = GaugeMetricFamily(
        "holdfast_oldest_queued_seconds", "How long the oldest claimable job has waited.", labels=["queue"]
    )
    for queue in loads:
        waited.add_metric([queue], oldest[queue] + age if queue in oldest else 0.0)
    yield waited


def _workers(service: ServiceState, workers: Sequence[WorkerRecord], totals: Mapping[str, Any]) -> Iterator[Metric]:
    live = GaugeMetricFamily("holdfast_workers", "Workers.", labels=["live"])
    for live_label, count in (("true", sum(w.live for w in workers)), ("false", sum(not w.live for w in workers))):
        live.add_metric([live_label], count)
    yield live
    reports = {worker.worker: worker.figures for worker in workers if worker.figures}
    reports[DEPARTED] = totals
    if service.direct is None:  # Otherwise the embedded worker has the same store and reports for both.
        reports[SERVER] = service.store.counters.figures()
    for name, about in COUNTED.items():
        counter = CounterMetricFamily(f"holdfast_{name}", about, labels=["worker"])
        for worker, figures in reports.items():
            counter.add_metric([worker], figures.get(name, 0))
        yield counter
    finishes = CounterMetricFamily("holdfast_finishes", "Attempts ended.", labels=["worker", "status"])
    duties = GaugeMetricFamily("holdfast_duty_done_timestamp_seconds", "When a duty was last done.", labels=["duty"])
    done: dict[str, float] = {}
    for worker, figures in reports.items():
        for status, count in figures.get("finishes", {}).items():
            finishes.add_metric([worker, status], count)
        for duty, at in figures.get("duties", {}).items():
            done[duty] = max(done.get(duty, 0.0), at)
    for duty, at in sorted(done.items()):
        duties.add_metric([duty], at)
    yield finishes
    yield duties


def _server(service: ServiceState) -> Iterator[Metric]:
    info = GaugeMetricFamily("holdfast_info", "This holdfast.", labels=["version"])
    info.add_metric([VERSION], 1)
    yield info
    requests = CounterMetricFamily("holdfast_http_requests", "Requests answered.", labels=["method", "route", "status"])
    for (method, path, status), count in sorted(service.requests.items()):
        requests.add_metric([method, path, str(status)], count)
    yield requests
    fanout = service.fanout
    yield GaugeMetricFamily("holdfast_stream_followers", "Clients that follow a job.", value=fanout.followers)
    yield GaugeMetricFamily("holdfast_stream_lag_seconds", "Age of the last event when it was read.", value=fanout.lag)
    yield CounterMetricFamily("holdfast_stream_looks", "Polls of all followed jobs.", value=fanout.polls)
    yield CounterMetricFamily("holdfast_stream_reads", "Blocks of events read.", value=fanout.reads)
    yield CounterMetricFamily("holdfast_stream_cuts", "Clients disconnected as too slow.", value=fanout.cut)
