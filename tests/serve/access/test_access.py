"""Who may use the server: the key and what it keeps from others, the origins of web pages, the names of the host."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from click.testing import CliRunner

from omni_actors.serve.command import serve_command
from omni_actors.serve.server import serve, warn_if_public
from omni_actors.serve.settings import ServerSettings, normalize_host, normalize_key, normalize_origin
from tests.support.http_server import NO_TLS, WATCHDOG_S

Start = Callable[..., AbstractContextManager[Any]]

INSIDE = """\
name: inside
stages:
  mind: {engine: "tests.support.served_engines:Inside", accepts: [messages], emits: text}
"""
APP = "https://app.example.org"
KEY = {"authorization": "Bearer sesame"}
PATIENT: Any = {"timeout": WATCHDOG_S, "verify": NO_TLS}
"""How a client of its own, without the key, asks."""


@pytest.fixture(scope="module")
def guarded(start: Start) -> Iterator[Any]:
    """Open to every address, with a key from a file, to one web page and under one name."""
    names = ("--allow-origin", f"{APP}/", "--allow-host", "0.0.0.0")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMNI_ACTORS_API_KEY", " sesame\n")
            server = stack.enter_context(start("--host", "0.0.0.0", *names, config=INSIDE))
        yield server
        assert server.stderr == "", "there is a key, so there is nothing to warn of"


# the key


def test_a_key_with_whitespace_around_it_is_the_key_without(guarded: Any) -> None:
    assert guarded.http.get("/v1/models", headers=KEY).status_code == 200
    assert guarded.http.get("/v1/models").status_code == 401


@pytest.mark.parametrize("key", ["se\nsame", "se\x00same", "sésame", "\x7f"])
def test_a_key_that_no_header_can_carry_is_refused_at_start(key: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        trio.run(serve, "echo", ServerSettings(api_key=key))
    result = CliRunner().invoke(serve_command, ["echo", "--api-key", key])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "printable ASCII" in result.stderr


def test_a_clean_key_is_itself() -> None:
    assert normalize_key("a key, with=punctuation") == "a key, with=punctuation"


def test_workers_know_neither_the_key_nor_the_command_line(guarded: Any) -> None:
    body = {"model": "inside", "messages": [{"role": "user", "content": "hello"}]}
    answer = guarded.http.post("/v1/chat/completions", json=body, headers=KEY).json()
    inside = json.loads(answer["choices"][0]["message"]["content"])
    assert inside["environment"]["PATH"]
    assert "OMNI_ACTORS_API_KEY" not in inside["environment"]
    assert not any("--allow-origin" in argument for argument in inside["arguments"])
    pid = guarded.http.get("/health", headers=KEY).json()["stages"]["mind"][0]["pid"]
    started_with = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"PATH=" in started_with
    assert b"OMNI_ACTORS_API_KEY" not in started_with


def test_health_tells_strangers_states_and_holders_of_the_key_the_rest(guarded: Any) -> None:
    states = {"mind": [{"replica": 0, "state": "ready"}]}
    public = {"status": "ready", "model": "inside", "ready": True, "errored": False, "stages": states}
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = guarded.http.get("/health", headers=headers)
        assert (answer.status_code, answer.json()) == (200, public)
    health = guarded.http.get("/health", headers=KEY).json()
    assert health["stages"]["mind"][0]["pid"] > 0
    assert health["stages"]["mind"][0]["history"] == []


@pytest.mark.parametrize(
    ("family", "address", "is_open"),
    [
        (socket.AF_INET, "127.0.0.1", False),
        (socket.AF_INET, "127.1.2.3", False),
        (socket.AF_INET6, "::1", False),
        (socket.AF_INET, "0.0.0.0", True),
        (socket.AF_INET6, "::", True),
    ],
)
def test_an_address_beyond_this_machine_is_worth_a_warning(
    family: socket.AddressFamily, address: str, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server((address, 0), family=family) as listener, caplog.at_level(logging.WARNING):
        warn_if_public(listener)
    assert [("--api-key" in message, address in message) for message in caplog.messages] == [(True, True)] * is_open


def test_an_open_server_without_a_key_warns_as_it_starts(start: Start) -> None:
    with start("--host", "0.0.0.0", config="echo", ready=False) as server:
        assert server.stderr.count("\n") == 1
        assert "no API key" in server.stderr


# web pages


@pytest.mark.parametrize(
    ("origin", "host", "may"),
    [
        ("http://localhost:8091", "localhost:8091", True),
        ("http://LOCALHOST:8091", "localhost:8091", True),
        ("http://[::1]:8091", "[::1]:8091", True),
        ("https://api.example.org", "api.example.org", True),
        ("https://api.example.org", "api.example.org:443", True),
        ("http://api.example.org:80", "api.example.org", True),
        ("https://evil.example.org", "localhost:8091", False),
        ("http://localhost:3000", "localhost:8091", False),
        ("http://localhost", "localhost:8091", False),
        ("http://localhost:8091.evil.example.org", "localhost:8091", False),
        ("null", "localhost:8091", False),
        ("", "localhost:8091", False),
        ("http://", "localhost:8091", False),
        ("é" * 1000, "localhost:8091", False),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_without_a_key_only_pages_of_the_servers_own_origin_may_use_it(
    studio: Any, method: str, origin: str, host: str, may: bool
) -> None:
    """A page of any other could send a simple POST: a form, or text that is JSON."""
    body = b'{"model": "studio", "input": "hello"}' if method == "POST" else b""
    headers = {b"origin": origin.encode("latin-1"), b"host": host.encode(), b"content-type": b"text/plain"}
    path = "/v1/audio/speech" if method == "POST" else "/v1/models"
    answer = httpx.request(method, studio.url + path, content=body, headers=headers, **PATIENT)
    if may:
        assert answer.status_code == (405 if method == "OPTIONS" else 200)
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
    assert "access-control-allow-origin" not in answer.headers


def test_with_a_key_a_page_that_holds_it_may_ask(slow: Any) -> None:
    """Its browser does not let it read the answer, where the origin was not allowed."""
    answer = slow.http.get("/v1/models", headers={"origin": "https://evil.example.org"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_an_allowed_page_may_read_its_answers(guarded: Any) -> None:
    """Errors too."""
    for headers, status in ((KEY, 200), ({}, 401)):
        answer = guarded.http.get("/v1/models", headers={"origin": APP, **headers})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, APP)
        assert "Origin" in answer.headers["vary"]


def test_a_browser_may_ask_without_the_key_what_an_allowed_page_may_send(guarded: Any) -> None:
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    answer = guarded.http.options("/v1/chat/completions", headers={"origin": APP, **wanted})
    assert answer.is_success
    assert answer.headers["access-control-allow-origin"] == APP
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_other_pages_are_refused_where_some_are_allowed_key_or_not(guarded: Any, method: str) -> None:
    for headers in ({}, KEY, {"access-control-request-method": "POST"}):
        asked = {"origin": "https://evil.example.org", **headers}
        answer = httpx.request(method, f"{guarded.url}/v1/models", headers=asked, **PATIENT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
        assert "access-control-allow-origin" not in answer.headers
    own = guarded.http.get("/v1/models", headers={"origin": guarded.url, **KEY})
    assert own.status_code == 200


def test_two_origins_must_both_be_allowed(guarded: Any) -> None:
    headers = [("origin", APP), ("origin", "https://evil.example.org"), *KEY.items()]
    assert guarded.http.get("/v1/models", headers=headers).status_code == 403


@pytest.mark.parametrize(
    "host", ["evil.example.org", "evil.example.org:8091", "0.0.0.0.evil.example.org", "[", "x" * 1000]
)
def test_a_request_for_another_host_is_refused_where_some_are_named(guarded: Any, host: str) -> None:
    answer = httpx.get(f"{guarded.url}/v1/models", headers={"host": host, **KEY}, **PATIENT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (421, "unknown_host")


def test_any_host_is_answered_where_none_is_named(studio: Any) -> None:
    assert studio.http.get("/v1/models", headers={"host": "somewhere.example.org"}).status_code == 200


@pytest.mark.parametrize(
    "given", ["https://app.example.org", "HTTPS://App.Example.org/", "app://obsidian.md", "http://[::1]:3000"]
)
def test_an_origin(given: str) -> None:
    assert normalize_origin(given) == given.lower().rstrip("/")


@pytest.mark.parametrize("given", ["api.example.org", "API.example.org", "127.0.0.1", "::1", "[::1]"])
def test_a_host(given: str) -> None:
    assert normalize_host(given) == given.lower().strip("[]")


@pytest.mark.parametrize(
    ("option", "given"),
    [
        *(
            ("--allow-origin", given)
            for given in ("app.example.org", "**", "null", "", "https://a.org/path", "https://a b")
        ),
        *(("--allow-host", given) for given in ("api.example.org:80", "*x/", "", "http://a.org", "a b", "[")),
    ],
)
def test_what_is_no_origin_and_no_host(option: str, given: str) -> None:
    result = CliRunner().invoke(serve_command, ["echo", option, given])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not a" in result.stderr
