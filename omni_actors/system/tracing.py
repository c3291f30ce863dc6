"""Makes OpenTelemetry spans of requests that have ended. Only a system with a tracer provider imports this module.

Rules
1. A request's spans are made together, when it is closed: that is when the sampler and the exporter see them. The
   provider's span processor must not block, as ``BatchSpanProcessor`` does not, because this runs in the event loop.
2. All times of one trace are converted from CLOCK_MONOTONIC to the wall clock with the same offset, so no adjustment of
   the wall clock distorts it.
3. Nothing that a client sends as a trace context, and nothing that a span processor raises, reaches the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context, create_key, get_current, get_value, set_value
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from omni_actors.config import Pipeline
from omni_actors.errors import RequestError, WorkerExit
from omni_actors.orchestrator.request import Request
from omni_actors.system.timeline import Facts, Period, pipeline_facts, timeline

CONTEXT_HEADERS = ("traceparent", "tracestate")

_IS_REMOTE = create_key("is_remote")
"""Is set in the context of a remote caller, also if that has no span."""

HTTP_REQUEST_ID = create_key("http_request_id")
"""Has the identifier of the HTTP request, in the context of one."""

log = logging.getLogger(__name__)


def remote_context(headers: Mapping[str, Any]) -> Context:
    """Return the context of a remote caller, from the W3C headers ``traceparent`` and ``tracestate``.

    A context that is malformed counts as none: the request begins a trace of its own.
    """
    given = {str(name).lower(): value for name, value in headers.items() if isinstance(value, str)}
    known = {name: given[name] for name in CONTEXT_HEADERS if name in given}
    return TraceContextTextMapPropagator().extract(known, set_value(_IS_REMOTE, True, Context()))


class Tracing:
    """Traces the requests of one system.

    Args:
        provider: makes the tracer; its owner shuts it down.
        pipeline: the pipeline that runs.
    """

    def __init__(self, provider: TracerProvider, pipeline: Pipeline) -> None:
        self._tracer: Tracer = provider.get_tracer("omni_actors")
        self._pipeline = pipeline
        self._facts = pipeline_facts(pipeline)
        self._name = f"{self._facts['gen_ai.operation.name']} {pipeline.name}"

    def context(self, headers: Mapping[str, Any] | None) -> Context:
        """Return the context that a new request's trace continues.

        headers: those of a remote caller, as for ``remote_context``. None: the current context.
        """
        return get_current() if headers is None else remote_context(headers)

    def record(self, request: Request) -> None:
        """Make the spans of a closed request, which ``context`` was called for."""
        try:
            self._record(request)
        except Exception:
            log.exception("the trace of request %s was lost", request.name)

    def _record(self, request: Request) -> None:
        offset_ns = time.time_ns() - time.monotonic_ns()
        kind = SpanKind.SERVER if get_value(_IS_REMOTE, request.trace) else SpanKind.INTERNAL
        began = _wall_ns(request.submitted, offset_ns)
        span = self._tracer.start_span(self._name, request.trace, kind, attributes=self._facts, start_time=began)
        if span.is_recording():  # else the sampler leaves the request out, and its timeline need not be made
            if isinstance(id := get_value(HTTP_REQUEST_ID, request.trace), str):
                span.set_attribute("omni_actors.http_request_id", id)
            self._fill(span, timeline(request, self._pipeline), request.trace, offset_ns)

    def _fill(self, span: Span, period: Period, context: Context, offset_ns: int) -> None:
        """Complete the span of a period, and make those of its parts."""
        ended = _wall_ns(period.ended, offset_ns)
        span.set_attributes(period.facts)
        for died, crash in period.deaths:
            span.add_event("worker_died", error_facts(crash), timestamp=_wall_ns(died, offset_ns))
        if period.error is not None:
            _record_error(span, period.error, ended)
        within = set_span_in_context(span, context)
        for part in period.parts:
            began = _wall_ns(part.began, offset_ns)
            self._fill(self._tracer.start_span(part.name, within, start_time=began), part, within, offset_ns)
        span.end(ended)


def _wall_ns(seconds: float, offset_ns: int) -> int:
    """Return a time of CLOCK_MONOTONIC on the wall clock."""
    return int(seconds * 1e9) + offset_ns


def _record_error(span: Span, error: RequestError, at_ns: int) -> None:
    span.set_status(Status(StatusCode.ERROR, str(error)))
    span.set_attribute("error.type", type(error).__name__)
    facts: Facts = {"exception.type": type(error).__name__, "exception.message": str(error)}
    span.add_event("exception", {**facts, **error_facts(error)}, timestamp=at_ns)


def error_facts(error: RequestError) -> Facts:
    """Return the facts of an error, with the names of its attributes."""
    facts: Facts = {"omni_actors.retryable": error.retryable}
    given: dict[str, Any] = vars(error)
    for name, value in given.items():
        if isinstance(value, str | int | float) and not name.startswith("_"):
            facts[f"omni_actors.{name}"] = value
        elif isinstance(value, WorkerExit) and value.reason is not None:
            facts["omni_actors.reason"] = value.reason
    return facts
