"""A system's metrics in the format of Prometheus. Times are seconds, sizes are bytes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric

from omni_actors.playback import Playback

LATENCY_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
INTERVAL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
PICTURE_BUCKETS = (*LATENCY_BUCKETS, 120.0, 300.0)
GAP_BUCKETS = (0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
RTF_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)

Gauges = Iterable[tuple[str, str, dict[str, str], float]]
"""(name, help, labels, value) of each figure. Figures of one name have the same labels."""


class SpokenStreams:
    """The spoken streams of one system, each with a simulated player (see ``playback``).

    registry: Receives the counter and the histogram. Underruns are counted when they happen.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open: weakref.WeakSet[Playback] = weakref.WeakSet()  # a dropped stream must not stay among the figures
        self._underruns = Counter(
            "omni_speech_underruns", "Gaps that a listener of a spoken stream hears", registry=registry
        )
        self._gaps = Histogram(
            "omni_speech_gap_seconds", "Duration of each of these gaps", buckets=GAP_BUCKETS, registry=registry
        )

    def open(self, ahead_s: float = 0.0) -> Playback:
        """Return the player of a new stream. It counts as open until ``close``, or until nothing refers to it.

        ahead_s: the sound of an earlier stream that the player has not played yet.
        """
        playback = Playback(ends=time.monotonic() + ahead_s if ahead_s else None)
        self._open.add(playback)
        return playback

    def feed(self, playback: Playback, duration_s: float) -> None:
        """Record that sound of this duration leaves for the client now."""
        gap_s = playback.feed(time.monotonic(), duration_s)
        if gap_s:
            self._underruns.inc()
            self._gaps.observe(gap_s)

    def close(self, playback: Playback) -> None:
        """Record that a stream has ended. Idempotent."""
        self._open.discard(playback)

    def gauges(self) -> Gauges:
        """Yield the figures of the streams that are open now."""
        now, streams = time.monotonic(), list(self._open)
        silent = sum(each.is_silent(now) for each in streams)
        ahead_s = min((each.ahead_s(now) for each in streams), default=0.0)
        yield "omni_speech_streams", "Spoken streams whose sound is being sent", {}, len(streams)
        yield "omni_speech_streams_silent", "Spoken streams whose listener waits for more sound", {}, silent
        yield "omni_speech_ahead_seconds", "Sound that the listener who has the least has not heard yet", {}, ahead_s


class Metrics:
    """The metrics of one system, in a registry of its own: two systems in a process do not mix.

    Args:
        gauges: Called at each scrape, for the figures that are read rather than counted.
    """

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "omni_requests", "Ended requests by outcome: done, or the name of the error", ["outcome"]
        )
        self.replays = counter("omni_request_replays", "Replays of requests after the death of a worker")
        self.ttft = histogram("omni_ttft_seconds", "Time to the first text", buckets=LATENCY_BUCKETS)
        self.ttfa = histogram("omni_ttfa_seconds", "Time to the first audio", buckets=LATENCY_BUCKETS)
        self.preview = histogram(
            "omni_preview_seconds", "Time to the first preview of a picture", buckets=PICTURE_BUCKETS
        )
        self.picture = histogram("omni_picture_seconds", "Time to the first finished picture", buckets=PICTURE_BUCKETS)
        self.latency = histogram("omni_request_seconds", "Time of a whole request", buckets=LATENCY_BUCKETS)
        self.rtf = histogram(
            "omni_rtf", "Real-time factor: time of a request / duration of its audio", buckets=RTF_BUCKETS
        )
        self.queue = histogram(
            "omni_queue_seconds",
            "Time that a request waited for a replica of each stage",
            buckets=(*INTERVAL_BUCKETS, 60.0),
        )
        stage = partial(histogram, labelnames=["stage"], buckets=(*INTERVAL_BUCKETS, 60.0))
        self.stage_queue = stage("omni_stage_queue_seconds", "Time until the engine loop of a stage took the request")
        self.stage_first_output = stage(
            "omni_stage_first_output_seconds", "Time from a stage's first input to its first output"
        )
        self.stage_output_interval = stage(
            "omni_stage_output_interval_seconds",
            "Time between two outputs of a stage for one request; of a stage without client, the mean per request",
        )
        self.transfer = histogram(
            "omni_edge_transfer_seconds",
            "Time from the moment a stage, or the client, sent its first chunk until the consumer's engine got it",
            labelnames=["producer", "consumer"],
            buckets=(0.0001, 0.00025, 0.0005, *INTERVAL_BUCKETS),
        )
        self.resume = histogram(
            "omni_resume_seconds",
            "Time from the death of a worker until the next new output of its stage for a request",
            labelnames=["stage"],
            buckets=LATENCY_BUCKETS,
        )
        self.speech = SpokenStreams(self.registry)
        self._gauges: Callable[[], Gauges] = lambda: [*gauges(), *self.speech.gauges()]
        self.registry.register(self)

    def read_through(self, run: Callable[[Callable[[], Gauges]], Gauges]) -> None:
        """Let scrapes in other threads read the figures: ``run`` calls a function in the system's thread."""
        gauges = self._gauges
        self._gauges = lambda: run(gauges)

    def exposition(self) -> bytes:
        """Return all metrics in the text format that a Prometheus server scrapes."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Return the figures that are read now. ``registry`` calls this at each scrape."""
        families: dict[str, Metric] = {}
        for name, help, labels, value in self._gauges():
            families.setdefault(name, Metric(name, help, "gauge")).add_sample(name, labels, value)
        return families.values()
