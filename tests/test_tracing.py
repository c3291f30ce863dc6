"""The traces of requests, with OpenTelemetry's own SDK and real workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from omni_actors import OmniSystem
from omni_actors.errors import Aborted, InvalidRequest, StageCrashed
from omni_actors.stages import assets
from omni_actors.sync import Omni
from omni_actors.system import tracing
from tests.support.echo_systems import ask, pid_of, read, wait_restarted, words_until
from tests.support.shared_system import SharedSystem, open_shared_system
from tests.support.spans import HOP, Spans, context_of, facts, times

TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE:032x}-{PARENT:016x}-01"
SLOW = {"stages.second.options": {"fan_out": 20, "step_s": 0.01}, "stages.second.restart.backoff_s": 0.01}
"""The second stage lives for 20 steps of each request."""


@pytest.fixture(scope="module")
def spans() -> Spans:
    return Spans()


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int], spans: Spans) -> Iterator[SharedSystem]:
    opening = lambda: OmniSystem.open("echo", overrides=SLOW, tracer_provider=spans.provider)  # noqa: E731
    with open_shared_system(opening, fixture_processes) as shared_system:
        yield shared_system


def test_a_request_its_stages_and_their_hops(shared_system: SharedSystem, spans: Spans) -> None:
    async def work(omni: OmniSystem) -> None:
        assert omni.is_tracing_enabled
        headers = {"Traceparent": TRACEPARENT, "tracestate": "vendor=1"}
        await read(omni.generate("hello", modalities=("text", "audio"), request_id="mine", trace_headers=headers))

    before = time.time_ns()
    shared_system.run(work)
    after = time.time_ns()
    trace = spans.take()
    trace.check()
    assert before <= times(trace.root)[0] <= times(trace.root)[1] <= after
    parent = trace.root.parent
    assert parent is not None
    assert (context_of(trace.root).trace_id, parent.span_id, parent.trace_state["vendor"]) == (TRACE, PARENT, "1")
    assert (trace.root.name, trace.root.kind) == ("generate_content echo", SpanKind.SERVER)
    assert trace.root.status.status_code is StatusCode.UNSET
    known = {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.response.time_to_first_chunk"}
    assert known <= facts(trace.root).keys()
    assert facts(trace.root)["gen_ai.request.model"] == "echo"
    assert facts(trace.root)["gen_ai.output.type"] == "speech"
    assert facts(trace.root)["omni_actors.request"] == "mine"
    assert facts(trace.root)["omni_actors.outcome"] == "done"
    assert sorted(span.name for span in trace.parts(trace.root)) == ["queue", "stage first", "stage second"]
    for stage, source, chunks in (("first", "client", 1), ("second", "first", 20)):
        [span] = trace.named(f"stage {stage}")
        hop = {part.name: part for part in trace.parts(span)}
        assert set(hop) == set(HOP)
        assert facts(hop["transfer"])["omni_actors.source"] == source
        assert facts(span)["omni_actors.chunks"] == chunks
        assert facts(hop["compute"])["omni_actors.step_s"] >= (0.2 if stage == "second" else 0)


MALFORMED: tuple[Any, ...] = (
    {"traceparent": ""},
    {"traceparent": "00-zz-01"},
    {"traceparent": TRACEPARENT + "," + TRACEPARENT},
    {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
    {"traceparent": "ff" + TRACEPARENT[2:]},
    {"traceparent": "0" * 100_000},
    {"traceparent": 7, 8: "9"},
    {"tracestate": "a=b"},
)


def test_a_malformed_context_begins_a_trace(shared_system: SharedSystem, spans: Spans) -> None:
    async def work(omni: OmniSystem) -> None:
        for headers in MALFORMED:
            await read(omni.generate("x", trace_headers=headers))
            trace = spans.take()
            assert trace.root.parent is None, headers
        odd = {"traceparent": TRACEPARENT, "tracestate": "=,,;\x00=" + "é" * 10_000}
        await read(omni.generate("x", trace_headers=odd))
        assert context_of(spans.take().root).trace_id == TRACE

    shared_system.run(work)


def test_a_request_continues_the_current_span(shared_system: SharedSystem, spans: Spans) -> None:
    async def work(omni: OmniSystem) -> None:
        with spans.provider.get_tracer("caller").start_as_current_span("caller") as caller:
            await read(omni.generate("x"))
        trace = spans.take()
        assert trace.root.name == "caller"
        [request] = trace.parts(trace.root)
        assert request.kind is SpanKind.INTERNAL
        assert context_of(request).trace_id == caller.get_span_context().trace_id

    shared_system.run(work)


def test_a_request_of_another_thread_continues_its_current_span() -> None:
    mine = Spans()
    with Omni.open("echo", tracer_provider=mine.provider) as omni:
        assert omni.is_tracing_enabled
        with mine.provider.get_tracer("caller").start_as_current_span("caller"):
            assert omni.generate("x").text() == "x"
    trace = mine.take()
    assert [span.name for span in trace.parts(trace.root)] == ["generate_content echo"]


def test_an_error_and_its_facts(shared_system: SharedSystem, spans: Spans) -> None:
    async def work(omni: OmniSystem) -> None:
        with pytest.raises(InvalidRequest):
            await read(ask(omni, stage="first", invalid="feed"))
        check_error(spans.take().root, "InvalidRequest", "omni_actors.code", "failed")
        generation = omni.generate("x", modalities=("audio",))
        generation.abort()
        with pytest.raises(Aborted):
            await read(generation)
        trace = spans.take()
        check_error(trace.root, "Aborted", "omni_actors.retryable", "aborted")
        assert not facts(trace.named("stage second")[0])["omni_actors.finished"]

    shared_system.run(work)


def check_error(span: ReadableSpan, error: str, fact: str, outcome: str) -> None:
    assert span.status.status_code is StatusCode.ERROR
    assert facts(span)["error.type"] == error
    assert facts(span)["omni_actors.outcome"] == outcome
    [event] = [event for event in span.events if event.name == "exception"]
    assert event.attributes is not None
    assert event.attributes["exception.type"] == error
    assert fact in event.attributes


def test_a_death_the_resume_and_its_cost(shared_system: SharedSystem, spans: Spans) -> None:
    async def work(omni: OmniSystem) -> None:
        killed, victim = trio.Event(), pid_of(omni, "second")
        generation = omni.generate(script=words_until(killed, "hello ", "again"), modalities=("audio",))
        await generation.__anext__()
        os.kill(victim, signal.SIGKILL)
        killed.set()
        outputs = await read(generation)
        assert outputs[-1].metrics is not None
        assert outputs[-1].metrics.replays == 1
        trace = spans.take()
        trace.check()
        assert trace.root.status.status_code is StatusCode.UNSET
        assert facts(trace.root)["omni_actors.replays"] == 1
        [died] = [event for event in trace.root.events if event.name == "worker_died"]
        assert died.attributes is not None
        assert died.attributes["omni_actors.pid"] == victim
        assert died.attributes["omni_actors.signal"] == "SIGKILL"
        lost, resumed = trace.named("stage second")
        check_lost(lost)
        assert facts(resumed)["omni_actors.resumed"]
        [resume] = trace.named("resume second")
        cost = [facts(resume)[f"omni_actors.resume.{name}"] for name in ("wait_s", "start_s", "compute_s")]
        assert times(resume)[0] == times(lost)[1]
        assert sum(cost) == pytest.approx((times(resume)[1] - times(resume)[0]) / 1e9, abs=1e-4)
        assert trace.named("stage first")

    shared_system.run(work)


def check_lost(span: ReadableSpan) -> None:
    assert span.status.status_code is StatusCode.ERROR
    assert facts(span)["error.type"] == "StageCrashed"
    assert not facts(span)["omni_actors.finished"]


def test_a_death_that_ends_the_request(shared_system: SharedSystem, spans: Spans) -> None:
    async def work(omni: OmniSystem) -> None:
        killed, before = trio.Event(), omni.health().stages["second"][0].generation
        script = words_until(killed, "hello ", "again")
        generation = omni.generate(script=script, modalities=("audio",), on_failure="fail")
        await generation.__anext__()
        os.kill(pid_of(omni, "second"), signal.SIGKILL)
        killed.set()
        with pytest.raises(StageCrashed):
            await read(generation)
        trace = spans.take()
        trace.check()
        check_error(trace.root, "StageCrashed", "omni_actors.signal", "failed")
        [lost] = trace.named("stage second")
        check_lost(lost)
        assert not trace.named("resume second")
        await wait_restarted(omni, "second", before + 1)

    shared_system.run(work)


class Raises(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise ZeroDivisionError("a bug of the operator's")


async def test_an_exporter_that_fails_and_a_sampler_that_takes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    failing, sampled_out = TracerProvider(shutdown_on_exit=False), Spans()
    failing.add_span_processor(Raises())
    sampled_out.provider.sampler = ALWAYS_OFF
    async with OmniSystem.open("echo", tracer_provider=failing) as omni:
        assert await omni.generate("hello").text() == "hello"
        assert [record.name for record in caplog.records] == [tracing.__name__]
        omni._ended.tracing = tracing.Tracing(sampled_out.provider, omni.pipeline)
        assert await omni.generate("hello").text() == "hello"
        omni._ended.tracing = None
        assert not omni.is_tracing_enabled
        assert await omni.generate("hello", trace_headers={"traceparent": TRACEPARENT}).text() == "hello"
    assert len(caplog.records) == 1
    assert not sampled_out.exporter.get_finished_spans()


@pytest.mark.voice
@pytest.mark.slow
async def test_a_spoken_answer_and_a_killed_model() -> None:
    for model in assets.NAMES:
        assets.prepare(model, print)
    spans = Spans()
    async with OmniSystem.open("voice", tracer_provider=spans.provider, **{"stages.llm.threads": 1}) as omni:
        generation = omni.generate("Name a famous painter.", modalities=("text", "audio"), max_tokens=24)
        await generation.__anext__()
        os.kill(pid_of(omni, "llm"), signal.SIGKILL)
        with trio.fail_after(100):
            answer = await generation.collect()
        trace = spans.take()
    assert answer.audio is not None
    trace.check()
    assert facts(trace.root)["gen_ai.request.max_tokens"] == 24
    assert facts(trace.root)["gen_ai.usage.output_tokens"] == answer.data["text"]["completion_tokens"]
    assert facts(trace.root)["gen_ai.response.finish_reasons"] == (answer.data["text"]["finish_reason"],)
    assert len(trace.named("stage llm")) == 2
    assert len(trace.named("resume llm")) == 1
    for stage in ("acoustic", "vocoder"):
        [span] = trace.named(f"stage {stage}")
        assert [part.name for part in trace.parts(span)] == HOP
