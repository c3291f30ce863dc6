"""A system's metrics in the format of Prometheus. Times are seconds, sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LATENCY_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
RTF_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)

Gauges = Iterable[tuple[str, str, dict[str, str], float]]
"""(name, help, labels, value) of each figure. Figures of one name have the same labels."""


class Metrics:
    """The metrics of one system, in a registry of its own: two systems in a process do not mix.

    Args:
        gauges: Called at each scrape, for the figures that are read rather than counted.
    """

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "omni_requests",
            "Ended requests by outcome: done, or the name of the error",
            ["outcome"],
            registry=self.registry,
        )
        self.replays = Counter(
            "omni_request_replays", "Replays of requests after the death of a worker", registry=self.registry
        )
        self.ttft = Histogram(
            "omni_ttft_seconds", "Time to the first text", buckets=LATENCY_BUCKETS, registry=self.registry
        )
        self.ttfa = Histogram(
            "omni_ttfa_seconds", "Time to the first audio", buckets=LATENCY_BUCKETS, registry=self.registry
        )
        self.rtf = Histogram(
            "omni_rtf",
            "Real-time factor: time of a request / duration of its audio",
            buckets=RTF_BUCKETS,
            registry=self.registry,
        )
        self.latency = Histogram(
            "omni_request_seconds", "Time of a whole request", buckets=LATENCY_BUCKETS, registry=self.registry
        )
        self.registry.register(_Gauges(gauges))

    def exposition(self) -> bytes:
        """Return all metrics in the text format that a Prometheus server scrapes."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Gauges]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, help, labels, value in self._read():
            family = families.setdefault(name, GaugeMetricFamily(name, help, labels=list(labels)))
            family.add_metric(list(labels.values()), value)
        return iter(families.values())

    def describe(self) -> Iterator[Metric]:
        return iter(())  # the names are known only at scrape time
