"""Measure what the traces of requests cost the parent (``python -m bench.tracing``).

The benchmark asks the pipeline "echo", two stages without models, for text and audio again and again, without a tracer
provider. Then it repeats, for one of these requests, exactly the calls that a tracer provider adds: taking the trace
context at submission, and making the spans at the end, with a sampler that takes no request and one that takes all.
At last it encodes the spans for OTLP, as a thread of the SDK does.

The figures are medians of rounds, in CPU time of the thread: another program that runs on the machine moves them less
than wall-clock time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import trio
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from omni_actors import OmniSystem
from omni_actors.config import Pipeline
from omni_actors.orchestrator.request import Request
from omni_actors.system.tracing import Tracing

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


async def measure(rounds: int, requests: int) -> dict[str, float]:
    """Return CPU microseconds for each request by what is measured, and the spans and bytes of a trace."""
    costs = []
    async with OmniSystem.open("echo") as system:
        for _ in range(rounds + 1):
            began = time.thread_time()
            for _ in range(requests):
                generation = system.generate("hello", modalities=("text", "audio"))
                await generation.collect()
            costs.append((time.thread_time() - began) / requests * 1e6)
        request, pipeline = generation.stream.request, system.pipeline
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    _trace(Tracing(provider, pipeline), request)
    spans = exporter.get_finished_spans()
    return {
        "a request without traces, in all": statistics.median(costs[1:]),
        "what a trace adds: sampled out": _calls(ALWAYS_OFF, pipeline, request, rounds, requests),
        "what a trace adds: sampled": _calls(ALWAYS_ON, pipeline, request, rounds, requests),
        "encoding, in a thread of the SDK": _median(lambda: encode_spans(spans).SerializeToString(), rounds, requests),
        "spans": len(spans),
        "bytes": len(encode_spans(spans).SerializeToString()),
    }


def _calls(sampler: Sampler, pipeline: Pipeline, request: Request, rounds: int, requests: int) -> float:
    provider = TracerProvider(sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter(), max_queue_size=20 * rounds * requests))
    tracing = Tracing(provider, pipeline)
    try:
        return _median(lambda: _trace(tracing, request), rounds, requests)
    finally:
        provider.shutdown()


def _trace(tracing: Tracing, request: Request) -> None:
    request.trace = tracing.context(HEADERS)
    tracing.record(request)


def _median(function: Callable[[], object], rounds: int, calls: int) -> float:
    """Return the CPU microseconds of a call."""
    found = []
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(calls):
            function()
        found.append((time.thread_time() - began) / calls * 1e6)
    return statistics.median(found)


@click.command()
@click.option("--rounds", default=15, show_default=True, help="Rounds of each measurement.")
@click.option("--requests", default=300, show_default=True, help="Requests in each round.")
@click.option("--json", "report", type=click.Path(path_type=Path), help="Write the figures to this file.")
def main(rounds: int, requests: int, report: Path | None) -> None:
    """Measure what the traces of requests cost the parent."""
    figures = trio.run(measure, rounds, requests)
    spans, size = figures.pop("spans"), figures.pop("bytes")
    click.echo("| CPU time in the parent | |\n|---|---|")
    for name, microseconds in figures.items():
        click.echo(f"| {name} | {microseconds:.0f} µs |")
    click.echo(f"A trace has {spans:.0f} spans and {size:.0f} bytes.")
    if report is not None:
        report.write_text(json.dumps({**figures, "spans": spans, "bytes": size}, indent=1))


if __name__ == "__main__":
    main()
