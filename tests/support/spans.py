"""Spans of a system's requests, kept in memory, and how they lie in each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

HOP = ["queue", "transfer", "compute"]


class Spans:
    """A tracer provider that keeps its spans."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def take(self) -> Trace:
        """Return the spans since the last call."""
        spans = self.exporter.get_finished_spans()
        self.exporter.clear()
        return Trace(spans)


class Trace:
    """The spans of one request."""

    def __init__(self, spans: Iterable[ReadableSpan]) -> None:
        self.spans = sorted(spans, key=lambda span: span.start_time or 0)
        ids = {context_of(span).span_id for span in self.spans}
        [self.root] = [span for span in self.spans if span.parent is None or span.parent.span_id not in ids]

    def parts(self, span: ReadableSpan) -> list[ReadableSpan]:
        own = context_of(span).span_id
        return [each for each in self.spans if each.parent is not None and each.parent.span_id == own]

    def named(self, name: str) -> list[ReadableSpan]:
        """The parts of the request with this name, the earliest first."""
        return [span for span in self.parts(self.root) if span.name == name]

    def check(self) -> None:
        """Every span has the trace of the root, and lies within its parent; no time is in the wrong order."""
        for span in self.spans:
            assert context_of(span).trace_id == context_of(self.root).trace_id
            assert times(span) == tuple(sorted(times(span)))
        for span in self.spans:
            for part in self.parts(span):
                assert times(span)[0] <= times(part)[0] <= times(part)[1] <= times(span)[1], (span.name, part.name)
            if span.name.startswith("stage "):
                hop = self.parts(span)
                assert all(a <= b for a, b in itertools.pairwise(times(part)[0] for part in hop))


def context_of(span: ReadableSpan) -> Any:
    context = span.get_span_context()
    assert context is not None
    return context


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def facts(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes
