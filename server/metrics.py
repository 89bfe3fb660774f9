"""Prometheus metrics. Requests are counted here; what the ranks report is read when somebody asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from server.engine_client import EngineClient

# They would be one more line for every metric, which nothing reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))

_GAUGES = {
    "running_requests": "Samples that take part in steps",
    "waiting_requests": "Samples that wait to be admitted",
    "waiting_tokens": "Prompt tokens of waiting samples",
    "used_tokens": "KV tokens in use by running samples",
    "evictable_tokens": "KV tokens of the prefix cache that can be evicted",
    "total_tokens": "KV tokens there are",
    "generation_throughput": "Generated tokens a second",
    "cache_hit_rate": "Share of prompt tokens taken from the prefix cache",
}
_COUNTERS = {
    "prompt_tokens_total": "Prompt tokens of admitted samples",
    "cached_tokens_total": "Prompt tokens taken from the prefix cache",
    "generated_tokens_total": "Tokens generated",
    "retractions_total": "Samples put back to waiting because KV memory ran out",
}
# Of servers that do one half of each request.
_PREFILL_GAUGES = {
    "bootstrapping_requests": "Samples whose decode server has not said yet where their KV goes",
    "sending_requests": "Samples whose prompt is computed and whose KV the decode server does not have yet",
}
_DECODE_GAUGES = {
    "connecting_requests": "Samples that wait for their prefill server or for KV memory",
    "receiving_requests": "Samples whose KV is under way",
}
_TRANSFER_GAUGES = {"transfer_rooms": "Hand-overs that are not forgotten yet, also those whose request has not come"}
_TRANSFER_COUNTERS = {
    "transfers_total": "Samples handed over",
    "transfer_failures_total": "Samples whose hand-over failed",
    "transferred_tokens_total": "Prompt tokens of samples handed over",
    "transfer_seconds_total": "Seconds that the samples handed over took for it",
}
_OF_MODE: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "null": (_GAUGES, _COUNTERS),
    "prefill": (_GAUGES | _PREFILL_GAUGES | _TRANSFER_GAUGES, _COUNTERS | _TRANSFER_COUNTERS),
    "decode": (_GAUGES | _DECODE_GAUGES | _TRANSFER_GAUGES, _COUNTERS | _TRANSFER_COUNTERS),
}


class _RankReports(Collector):
    """The newest load report of each rank, as metrics with the label `rank`."""

    def __init__(self, client: EngineClient, mode: str) -> None:
        self._client = client
        self._gauges, self._counters = _OF_MODE[mode]

    def collect(self) -> Iterator[Metric]:
        for name, text in self._gauges.items():
            yield self._fill(GaugeMetricFamily(f"lockstep_{name}", text, labels=["rank"]), name)
        for name, text in self._counters.items():
            yield self._fill(CounterMetricFamily(f"lockstep_{name}", text, labels=["rank"]), name)

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, name: str
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for report in self._client.load_reports:
            family.add_metric([str(report.rank)], getattr(report, name))
        return family


class Histogram(Collector):
    """As the library's, but for the event loop alone: one value a token is observed, and its locks take microseconds.

    bounds: upper ends of the buckets, inclusive and rising; a last one without end is added.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text = name, text
        self._bounds = bounds
        self._labels = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._counts = [0] * len(self._labels)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        buckets = list(zip(self._labels, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """Each API process has its own registry, so that several can live in one Python process.

    mode: a value of EngineConfig.disaggregation_mode.
    """

    def __init__(self, client: EngineClient, mode: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_RankReports(client, mode))
        self._finished = Counter(
            "lockstep_requests", "Samples ended, by finish reason", ["finish_reason"], registry=self._registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(reason)
        self._rejected = Counter(
            "lockstep_http_errors", "HTTP requests answered with an error", ["status"], registry=self._registry
        )
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first output", _LATENCY_BUCKETS
        )
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds", "Between tokens of one sample", _INTER_TOKEN_BUCKETS
        )
        self.request_seconds = self._histogram(
            "request_seconds", "From the arrival of a request to its end", _LATENCY_BUCKETS
        )
        self._prompt_tokens = self._histogram("prompt_tokens", "Prompt tokens of a sample", _TOKEN_BUCKETS)
        self._generated_tokens = self._histogram("completion_tokens", "Tokens of a sample", _TOKEN_BUCKETS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"lockstep_{name}", text, buckets)
        self._registry.register(histogram)
        return histogram

    def finished(self, reason: str, prompt_tokens: int, generated_tokens: int) -> None:
        """reason: "stop", "length", "abort" (by the client) or "error"."""
        self._finished.labels(reason).inc()
        self._prompt_tokens.observe(prompt_tokens)
        self._generated_tokens.observe(generated_tokens)

    def rejected(self, status: int) -> None:
        self._rejected.labels(str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
