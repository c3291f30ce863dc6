"""The traces of a server: a client's context goes in, and spans come out at a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from omni_actors.serve.command import serve_command
from tests.support.http_server import WATCHDOG_S, Start

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Receives spans as an OpenTelemetry collector does."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.received: queue.Queue[ResourceSpans] = queue.Queue()

    def requests(self, count: int) -> list[tuple[ResourceSpans, list[Span]]]:
        """Wait for the first spans of ``count`` requests; return each with all spans that came with it."""
        found: list[tuple[ResourceSpans, list[Span]]] = []
        while len(found) < count:
            resource = self.received.get(timeout=WATCHDOG_S)
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            found += [(resource, spans)] * sum(span.name.startswith("generate_content") for span in spans)
        return found


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                found.received.put(resource)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def test_the_spans_of_requests_reach_a_collector(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch is sent while the server ends."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with collector() as found, start("--otlp-endpoint", found.url, config="echo") as server:
        with server.openai() as client:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "x-request-id": "job-7"}
            for extra in (headers, {"traceparent": "no context", "tracestate": ",,=;" * 1000}, {}):
                answer = client.chat.completions.create(
                    model="echo", messages=[{"role": "user", "content": "hello"}], extra_headers=extra
                )
                assert answer.choices[0].message.content == "hello"
            stream = client.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": "hi"}], extra_headers=headers, stream=True
            )
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hi"
        server.process.terminate()
        assert server.wait_end() == 0
        assert server.stderr == ""
        arrived = found.requests(4)
    roots = [span for span in arrived[0][1] if span.name == "generate_content echo"]
    assert [span.trace_id.hex() == TRACE for span in roots] == [True, False, False, True]
    assert [span.parent_span_id.hex() for span in roots] == [PARENT, "", "", PARENT]
    assert roots[0].trace_state == "vendor=1"
    ids = [item.value.string_value for item in roots[0].attributes if item.key == "omni_actors.http_request_id"]
    assert ids == ["job-7"]
    assert {span.kind for span in roots} == {Span.SPAN_KIND_SERVER}
    stages = [span for span in arrived[0][1] if span.name == "stage first"]
    assert [span.parent_span_id for span in stages] == [span.span_id for span in roots]
    attributes = {item.key: item.value.string_value for item in arrived[0][0].resource.attributes}
    assert (attributes["service.name"], attributes["deployment.environment"]) == ("omni_actors", "test")


@pytest.mark.slow
def test_the_environment_turns_tracing_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        with start(config="echo") as server, server.openai() as client:
            client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hello"}])
            [(resource, _)] = found.requests(1)
    assert {item.key: item.value.string_value for item in resource.resource.attributes}["service.name"] == "mine"


@pytest.mark.slow
def test_a_collector_that_is_not_there_costs_nothing_but_the_traces(start: Start) -> None:
    with start("--otlp-endpoint", "http://127.0.0.1:9", config="echo") as server:
        with server.openai() as client:
            client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hello"}])
        server.process.terminate()
        assert server.wait_end() == 0


def test_a_wrong_endpoint_is_refused() -> None:
    done = CliRunner().invoke(serve_command, ["echo", "--otlp-endpoint", "localhost:4318"])
    assert done.exit_code == 2
    assert "is not a URL such as http://localhost:4318" in done.output
