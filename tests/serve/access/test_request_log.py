"""The identifiers of requests, the access log, the headers for web pages, and the notice before a drain."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest

from omni_actors.serve.settings import ServerSettings
from tests.support.http_server import Start, until

APP = "https://app.example.org"
HELLO: Any = [{"role": "user", "content": "hello"}]
MIND = """\
name: studio
stages:
  mind: {engine: echo, accepts: [messages], emits: text}
"""


@pytest.fixture(scope="module")
def logged(start: Start) -> Iterator[Any]:
    with start("--access-log", "--log-format", "plain", "--allow-origin", "*", config=MIND) as server:
        yield server


def lines(server: Any, id: str) -> list[str]:
    """Wait for the log line of a request."""
    until(lambda: f"{id}\n" in server.stderr, f"the log line of {id}")
    return [line for line in server.stderr.splitlines() if line.endswith(id)]


def test_a_request_has_one_line_with_the_clients_identifier(logged: Any) -> None:
    answer = logged.http.get("/v1/models?key=secret", headers={"x-request-id": "job-7/a.b:c=+d"})
    assert answer.headers["x-request-id"] == "job-7/a.b:c=+d"
    [line] = lines(logged, "job-7/a.b:c=+d")
    pattern = r'.* INFO 127\.0\.0\.1:\d+ - "GET /v1/models HTTP/1\.1" 200 %d bytes \d+\.\d{3} s job-7/a\.b:c=\+d'
    assert re.fullmatch(pattern % len(answer.content), line), line
    assert "secret" not in logged.stderr


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "<script>", 'a"b'])
def test_an_identifier_that_could_mislead_a_reader_of_the_log_is_replaced(logged: Any, given: str) -> None:
    id = logged.http.get("/ping", headers={"x-request-id": given}).headers["x-request-id"]
    assert re.fullmatch("req_[0-9a-f]{32}", id)
    assert len(lines(logged, id)) == 1


def test_the_client_has_the_identifier_of_its_answer_and_of_its_error(logged: Any) -> None:
    with logged.openai() as client:
        answer = client.chat.completions.create(model="studio", messages=HELLO)
        assert answer._request_id is not None
        assert " 200 " in lines(logged, answer._request_id)[0]
    refused = logged.http.post("/v1/chat/completions", json={"model": "other", "messages": HELLO})
    assert " 404 " in lines(logged, refused.headers["x-request-id"])[0]


@pytest.mark.parametrize(("plain", "sent"), [("/r", "/r"), ("/r", "/%72"), ("/r", "%2Fr")])
def test_the_id_of_a_stored_response_is_cut(logged: Any, plain: str, sent: str) -> None:
    with logged.openai() as client:
        stored = client.responses.create(model="studio", input="hello")
    answer = logged.http.get(f"/v1/responses/{stored.id}".replace(f"{plain}esp_", f"{sent}esp_"))
    assert answer.status_code == 200
    [line] = lines(logged, answer.headers["x-request-id"])
    assert f"/{stored.id[:17]} " in unquote(line)
    assert stored.id[1:] not in logged.stderr


def test_a_body_that_is_no_http_is_refused_as_other_requests_are(logged: Any) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: cut-chunk\r\n"
    with socket.create_connection(("127.0.0.1", logged.port)) as client:
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n")
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: cut-chunk\r\n" in answer
    [line] = lines(logged, "cut-chunk")
    assert " 400 " in line


def test_a_path_cannot_break_the_line(logged: Any) -> None:
    answer = logged.http.get("/a%0d%0aINFO%20forged" + "x" * 1000)
    [line] = lines(logged, answer.headers["x-request-id"])
    assert "/a%0d%0aINFO%20forged" in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("request_line", "logged_as"),
    [
        (b'GET /a"b HTTP/1.1', '"GET /a%22b HTTP/1.1"'),
        (b"A" * 60_000 + b" /a HTTP/1.1", f'"{"A" * 20} /a HTTP/1.1"'),
    ],
    ids=["quote", "method"],
)
def test_a_request_line_cannot_end_its_quotes_or_fill_the_log(
    logged: Any, request_line: bytes, logged_as: str, request: pytest.FixtureRequest
) -> None:
    id = f"odd-{request.node.callspec.id}"
    head = f"\r\nHost: x\r\nX-Request-ID: {id}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", logged.port), 60) as client:
        client.sendall(request_line + head.encode())
        assert client.recv(12).startswith(b"HTTP/1.1 40")
    [line] = lines(logged, id)
    assert logged_as in line


def test_a_client_that_leaves_before_its_answer_has_a_line(start: Start) -> None:
    endless = ("-s", "stages.mind.options={fan_out: 1000000, step_s: 0.01}")
    with start("--access-log", *endless, config=MIND) as server:
        body = json.dumps({"model": "studio", "messages": HELLO}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Request-ID: left\r\nContent-Length: %d\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), 60) as client:
            client.sendall(head % len(body) + body)
            server.wait_metric("omni_requests_in_flight", 1)
        [line] = lines(server, "left")
        assert '"POST /v1/chat/completions HTTP/1.1" 499 0 bytes' in line


def test_every_page_may_use_a_server_that_allows_all(logged: Any) -> None:
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-request-id"}
    preflight = logged.http.options("/v1/chat/completions", headers={"origin": APP, **wanted})
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "*")
    answer = logged.http.get("/v1/models", headers={"origin": APP})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


def test_pages_of_named_origins_may_send_cookies_by_flag(start: Start) -> None:
    with start("--allow-origin", APP, "--allow-credentials", config=MIND, ready=False) as server:
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        for answer in (
            server.http.get("/v1/models", headers={"origin": APP}),
            server.http.options("/v1/models", headers={"origin": APP, **wanted}),
        ):
            assert answer.headers["access-control-allow-origin"] == APP
            assert answer.headers["access-control-allow-credentials"] == "true"


def test_all_pages_with_cookies_is_refused() -> None:
    with pytest.raises(ValueError, match="name the origins"):
        ServerSettings(allow_origins=["*"], allow_credentials=True)


def test_health_reports_a_drain_before_it_begins(start: Start) -> None:
    """Load balancers see it while requests are still served."""
    with start("--drain-notice-s", "600", config=MIND) as server, server.openai() as client:
        server.signal(signal.SIGTERM)
        server.wait(lambda: server.status() == "draining", "the drain to be reported")
        assert server.http.get("/health").status_code == server.http.get("/ping").status_code == 503
        assert client.chat.completions.create(model="studio", messages=HELLO).choices[0].message.content == "hello"
        assert "draining: new requests are served for 600 s more" in server.stderr
        server.process.kill()


def test_the_drain_follows_the_notice(start: Start) -> None:
    with start("--drain-notice-s", "0.1", config=MIND) as server:
        code, _ = server.ends_by(signal.SIGTERM)
        assert code == 0
        server.wait_refusing()
