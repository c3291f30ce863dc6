"""Requests that do not complete: too many, too long, abandoned, or their stage is killed."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import openai
import pytest

MIND = """\
name: studio
stages:
  mind: {engine: echo, accepts: [messages], emits: text, options: {fan_out: 1000000, step_s: 0.01}}
"""
"""It answers for hours."""
NOT_REPLAYED = ("-s", "limits.replays=0")
SLOW_SPEECH = """\
name: studio
stages:
  ear: {engine: "tests.support.served_engines:Ear", accepts: [audio], emits: transcript,
    options: {step_s: 600}, shutdown_timeout_s: 0.1}
  mouth: {engine: "tests.support.served_engines:Speaker", accepts: [script], emits: audio, options: {step_s: 0.01}}
"""
"""The ear takes ten minutes for a step."""
Start = Callable[..., AbstractContextManager[Any]]

IN_FLIGHT = "omni_requests_in_flight"
ARRIVING = "omni_http_arriving"
LONG = "w " * 2000


def talk(client: openai.OpenAI, **arguments: Any) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    return client.chat.completions.create(**{"model": "studio", "messages": messages, **arguments})


def test_text_is_sent_while_it_is_generated(slow: Any) -> None:
    with slow.openai() as client, talk(client, stream=True) as answer:
        pieces = iter(answer)
        assert [next(pieces).choices[0].delta.content for _ in range(3)] == ["", "hello", "hello"]
        assert slow.metric(IN_FLIGHT) == 1
    slow.wait_metric(IN_FLIGHT, 0)


def test_audio_is_sent_while_it_is_generated(slow: Any) -> None:
    with slow.openai() as client:
        speech = client.audio.speech.with_streaming_response.create(
            model="studio", voice="any", input=LONG, response_format="wav"
        )
        with speech as answer:
            pieces = answer.iter_bytes()
            assert next(pieces).startswith(b"RIFF")
            assert slow.metric(IN_FLIGHT) == 1
    slow.wait_metric(IN_FLIGHT, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_the_request(slow: Any, stream: bool) -> None:
    """It ends by an abort, long before its deadline."""
    slow.wait_metric(IN_FLIGHT, 0)
    before = slow.aborted()
    body = {"model": "studio", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    with connection(slow, body) as leaver:
        slow.wait_metric(IN_FLIGHT, 1)
        if stream:
            assert leaver.recv(12) == b"HTTP/1.1 200"
    slow.wait_metric(IN_FLIGHT, 0)
    assert slow.aborted() == before + 1
    for stage in ("mind", "mouth"):
        assert slow.metric(f'omni_stage_requests{{replica="0",stage="{stage}"}}') == 0


@contextlib.contextmanager
def connection(server: Any, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A bare connection on which a chat has been asked for. Leaving closes it at once."""
    request = httpx.Request(
        "POST", f"{server.url}/v1/chat/completions", json=body, headers={"authorization": "Bearer sesame"}
    )
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection(("127.0.0.1", server.port)) as bare:
        bare.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + request.read())
        yield bare


def test_requests_above_the_limit_get_retry_after(slow: Any) -> None:
    slow.wait_metric(IN_FLIGHT, 0)
    with slow.openai() as client, talk(client, stream=True) as one, talk(client, stream=True) as two:
        next(iter(one)), next(iter(two))
        with pytest.raises(openai.RateLimitError) as caught:
            talk(client)
        assert int(caught.value.response.headers["retry-after"]) >= 1
    slow.wait_metric(IN_FLIGHT, 0)


def test_a_client_sends_a_request_again_that_an_engine_has_refused_for_now(studio: Any) -> None:
    with studio.openai() as client:
        speech = {"model": "studio", "voice": "any", "input": "later", "response_format": "wav"}
        with pytest.raises(openai.InternalServerError, match="cannot be spoken yet") as caught:
            client.audio.speech.create(**speech)
        assert (caught.value.status_code, caught.value.code) == (503, "too_early")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert client.audio.speech.create(**speech).content.startswith(b"RIFF")
        retrying = client.with_options(max_retries=1)
        assert retrying.audio.speech.create(**speech).content.startswith(b"RIFF")


def test_slow_uploads_take_no_place(slow: Any) -> None:
    """However many there are. When their clients disconnect, nothing is kept."""
    slow.wait_metric(IN_FLIGHT, 0)
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n"
    with contextlib.ExitStack() as coming:
        for number in range(1, 6):
            bare = coming.enter_context(socket.create_connection(("127.0.0.1", slow.port)))
            bare.sendall(head + b"Content-Length: 9\r\n\r\n{")
            slow.wait_metric(ARRIVING, number)
        assert slow.http.post("/v1/chat/completions", content=b"no JSON").status_code == 400
    slow.wait_metric(ARRIVING, 0)


def test_a_request_in_flight_takes_one_place(start: Start, recording: Callable[..., bytes]) -> None:
    """Its ticket is released when the system counts it."""
    form = httpx.Request(
        "POST", "http://x/", data={"model": "studio"}, files={"file": ("a.wav", recording())}, headers={"host": "x"}
    )
    asked = [
        (
            "/v1/audio/speech",
            {"content-type": "application/json", "host": "x"},
            b'{"model": "studio", "input": "%s"}' % LONG.encode(),
        ),
        ("/v1/audio/transcriptions", dict(form.headers), form.read()),
    ]
    with start("-s", "limits.max_requests=2", config=SLOW_SPEECH) as server:
        for path, headers, body in asked:
            head = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "content-length": len(body)}.items())
            with socket.create_connection(("127.0.0.1", server.port)) as bare:
                bare.sendall(f"POST {path} HTTP/1.1\r\n{head}".encode() + b"\r\n" + body)
                server.wait_metric(IN_FLIGHT, 1)
                assert server.http.post("/v1/chat/completions", content=b"no JSON").status_code == 400
            server.wait_metric(IN_FLIGHT, 0)


@pytest.mark.slow
def test_a_deadline_ends_a_whole_answer_with_504_and_a_stream_with_an_event(start: Start) -> None:
    late = r"did not finish within 10 s"
    with start("-s", "limits.deadline_s=10.0", config=MIND) as server, server.openai() as client:
        stream = talk(client, stream=True)
        next(iter(stream))
        with pytest.raises(openai.InternalServerError, match=late) as caught:
            talk(client)
        assert caught.value.status_code == 504
        with pytest.raises(openai.APIError, match=late):
            for _ in stream:
                pass


def test_a_killed_stage_fails_its_requests_by_name_and_serves_the_next(start: Start) -> None:
    """A stream by an event, and an answer that was to come whole with 500."""
    body = {"model": "studio", "messages": [{"role": "user", "content": "hi"}]}
    with start(*NOT_REPLAYED, config=MIND) as server, server.openai() as client, connection(server, body) as whole:
        stream = talk(client, stream=True)
        next(iter(stream))
        server.wait_metric(IN_FLIGHT, 2)
        os.kill(server.pid_of("mind"), signal.SIGKILL)
        with pytest.raises(openai.APIError, match=r"stage 'mind' .*SIGKILL") as caught:
            for _ in stream:
                pass
        assert (caught.value.type, caught.value.code) == ("server_error", "stage_crashed")
        with contextlib.closing(http.client.HTTPResponse(whole)) as answer:
            answer.begin()
            assert answer.status == 500
            assert b"SIGKILL" in answer.read()
        with talk(client, stream=True) as stream:
            assert next(iter(stream)).choices[0].delta.role == "assistant"
        assert "SIGKILL" in server.stderr


def test_audio_that_cannot_continue_is_cut(start: Start) -> None:
    body = {"model": "studio", "input": LONG, "response_format": "wav"}
    with start(*NOT_REPLAYED, config=SLOW_SPEECH) as server:
        with server.http.stream("POST", "/v1/audio/speech", json=body) as answer:
            pieces = answer.iter_bytes()
            assert next(pieces).startswith(b"RIFF")
            os.kill(server.pid_of("mouth"), signal.SIGKILL)
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):  # ended too soon, or reset
                for _ in pieces:
                    pass
        body["input"] = "hello"
        assert server.http.post("/v1/audio/speech", json=body).content.startswith(b"RIFF")
