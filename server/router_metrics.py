"""Prometheus metrics of the router."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.router_workers import Dispatcher

disable_created_metrics()  # type: ignore[no-untyped-call]

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)


class _Workers(Collector):
    """What the dispatcher knows, read when somebody asks."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "server"]
        in_flight = GaugeMetricFamily("lockstep_router_in_flight", "Requests at a server", labels=labels)
        healthy = GaugeMetricFamily("lockstep_router_healthy", "1 while a server gets requests", labels=labels)
        for worker in self._dispatcher.workers:
            in_flight.add_metric([worker.role, worker.url], worker.in_flight)
            healthy.add_metric([worker.role, worker.url], worker.healthy)
        queued = GaugeMetricFamily("lockstep_router_queued", "Requests that wait for a place at a server")
        queued.add_metric([], self._dispatcher.queued)
        yield from (in_flight, healthy, queued)


class RouterMetrics:
    """Each router has its own registry, so that several can live in one Python process."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Workers(dispatcher))
        self._requests = Counter(
            "lockstep_router_requests",
            "Requests ended: ok, error (none of it was sent), broken (after a part was sent) or abort (client gone)",
            ["outcome"],
            registry=self._registry,
        )
        for outcome in ("ok", "error", "broken", "abort"):
            self._requests.labels(outcome)
        self._retries = Counter(
            "lockstep_router_retries", "Further attempts, by the role that failed", ["role"], registry=self._registry
        )
        for role in ("prefill", "decode"):
            self._retries.labels(role)
        self._errors = Counter(
            "lockstep_router_http_errors", "Requests answered with an error", ["status"], registry=self._registry
        )
        self.queue_seconds = self._histogram("queue_seconds", "From the arrival of a request to its servers")
        self.first_byte_seconds = self._histogram("first_byte_seconds", "From the arrival of a request to its answer")
        self.request_seconds = self._histogram("request_seconds", "From the arrival of a request to its end")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"lockstep_router_{name}", text, buckets=_BUCKETS, registry=self._registry)

    def ended(self, outcome: str) -> None:
        """outcome: "ok", "error", "broken" or "abort"."""
        self._requests.labels(outcome).inc()

    def retried(self, role: str) -> None:
        self._retries.labels(role).inc()

    def rejected(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
