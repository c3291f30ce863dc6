"""What the system counts, as Prometheus metrics. Times are seconds, sizes bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LATENCY_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
RTF_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)

Gauges = Iterable[tuple[str, str, dict[str, str], float]]
"""(name, help, labels, value); samples of one name come together."""


class Metrics:
    """One registry per system, so that two systems in a process do not mix.

    gauges: read at each scrape.
    """

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "omni_requests",
            "Requests ended, by how: done, aborted, or the error's name",
            ["outcome"],
            registry=self.registry,
        )
        self.replays = Counter(
            "omni_request_replays",
            "Times that a request was replayed after the death of a worker",
            registry=self.registry,
        )
        self.ttft = Histogram(
            "omni_ttft_seconds", "Time to the first text delta", buckets=LATENCY_BUCKETS, registry=self.registry
        )
        self.ttfa = Histogram(
            "omni_ttfa_seconds", "Time to the first audio chunk", buckets=LATENCY_BUCKETS, registry=self.registry
        )
        self.rtf = Histogram(
            "omni_rtf", "Time of a request / duration of the audio it gave", buckets=RTF_BUCKETS, registry=self.registry
        )
        self.latency = Histogram(
            "omni_request_seconds", "Time of a whole request", buckets=LATENCY_BUCKETS, registry=self.registry
        )
        self.registry.register(_Gauges(gauges))

    def exposition(self) -> bytes:
        """The text format that a Prometheus server scrapes."""
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
        return iter(())  # its names are known at scrape time only
