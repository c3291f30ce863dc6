"""What is kept of ended requests: counts and times in the metrics, the latest ones for the live state, and traces."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import Counter, Histogram

from omni_actors.config import Pipeline
from omni_actors.metrics import Metrics, SpokenStreams
from omni_actors.orchestrator.request import Request
from omni_actors.outputs import RequestMetrics
from omni_actors.protocol.messages import CLIENT
from omni_actors.system.live_requests import LiveRequest, live_request
from omni_actors.system.timeline import Period, first_sent, timeline

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider  # of the extra "tracing"

    from omni_actors.system.tracing import Tracing

Labelled = TypeVar("Labelled", Counter, Histogram)

RECENT = 24
"""How many ended requests the live state shows."""


def _child(metric: Labelled, *labels: str) -> Labelled:
    return metric.labels(*labels)


class EndedRequests:
    """Records the requests of one system.

    Args:
        pipeline: The pipeline that runs.
        metrics: Those of the system.
        tracing: Makes the traces; None: there are none.
    """

    def __init__(self, pipeline: Pipeline, metrics: Metrics, tracing: Tracing | None) -> None:
        self._pipeline, self._metrics, self.tracing = pipeline, metrics, tracing
        self._child = functools.cache(_child)
        """Returns ``metric.labels(...)``, which takes as long as several observations. There are few labels."""
        self.profiled: deque[tuple[str, Period]] | None = None
        """Names and timelines of the requests that ended since a profile began; None: no profile runs."""
        self._recent: deque[Request | LiveRequest] = deque(maxlen=RECENT)
        """The latest ended requests, the earliest first. A state of one that is done is made when first shown."""

    def closed(self, request: Request) -> None:
        """Record a request that has ended, and whose client has everything or was cut off."""
        self._child(self._metrics.requests, type(request.error).__name__ if request.error else "done").inc()
        if request.replays:
            self._metrics.replays.inc(request.replays)
        if request.dispatched is not None and not request.deaths.losses:  # a replay has times of another kind
            self._observe_stages(request, request.dispatched)
        for loss in request.deaths.losses:
            if loss.resumed is not None:
                self._child(self._metrics.resume, loss.crash.stage).observe(loss.resumed - loss.at)
        if self.tracing is not None and request.trace is not None:
            self.tracing.record(request)
        # An error keeps its traceback, and so all that the request's caller had in hand: do not keep it.
        self._recent.append(request if request.error is None else live_request(request, self._pipeline))
        if self.profiled is not None:
            self.profiled.append((request.name, timeline(request, self._pipeline)))

    def _observe_stages(self, request: Request, dispatched: float) -> None:
        """Record how long a request waited, and how fast each stage was that has finished it."""
        self._metrics.queue.observe(dispatched - request.submitted)
        for name, stats in request.stats.items():
            self._child(self._metrics.stage_queue, name).observe(max(0.0, stats.started - dispatched))
            if stats.first_input is not None and (sent := first_sent(request, name, dispatched, stats.first_input)):
                transfer_s = stats.first_input - max(stats.started, sent[0])
                self._child(self._metrics.transfer, sent[1], name).observe(max(0.0, transfer_s))
            if stats.first_output is None:
                continue
            if stats.first_input is not None:
                self._child(self._metrics.stage_first_output, name).observe(stats.first_output - stats.first_input)
            if stats.chunks > 1 and CLIENT not in request.route.targets[name]:
                interval_s = (stats.finished - stats.first_output) / (stats.chunks - 1)
                self._child(self._metrics.stage_output_interval, name).observe(interval_s)

    @property
    def recent(self) -> list[LiveRequest]:
        """The states of the latest ended requests, the earliest first."""
        states = [live_request(each, self._pipeline) if isinstance(each, Request) else each for each in self._recent]
        self._recent = deque(states, maxlen=RECENT)
        return states

    @property
    def speech(self) -> SpokenStreams:
        """The spoken streams of the system."""
        return self._metrics.speech

    def interval(self, stage: str, interval_s: float) -> None:
        """Record the time between two outputs of a stage that reached the client, one after the other."""
        self._child(self._metrics.stage_output_interval, stage).observe(interval_s)

    def answered(self, measured: RequestMetrics) -> None:
        """Record the measurements of a request whose client has read its whole answer."""
        self._metrics.latency.observe(measured.total_s)
        for histogram, value in (
            (self._metrics.ttft, measured.ttft_s),
            (self._metrics.ttfa, measured.ttfa_s),
            (self._metrics.preview, measured.preview_s),
            (self._metrics.picture, measured.picture_s),
            (self._metrics.rtf, measured.rtf),
        ):
            if value is not None:
                histogram.observe(value)


def tracing_with(provider: TracerProvider | None, pipeline: Pipeline) -> Tracing | None:
    """Return what traces the requests of a pipeline with ``provider``; None without one."""
    if provider is None:
        return None
    from omni_actors.system.tracing import Tracing  # imports OpenTelemetry, which only the extra installs

    return Tracing(provider, pipeline)
