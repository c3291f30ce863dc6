"""Every refusal has OpenAI's error object, with the status and the parameter to change."""

from __future__ import annotations

import ast
import base64
import io
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from omni_actors.errors import (
    Aborted,
    DeadlineExceeded,
    Death,
    InvalidRequest,
    Overloaded,
    SlowConsumer,
    StageCrashed,
    StageFailed,
    StageUnavailable,
    TemporarilyRefused,
    WorkerExit,
)
from omni_actors.serve.api.errors import _STATUSES, renaming, to_http_error
from omni_actors.serve.http.errors import HTTPError
from tests.support.http_server import NO_TLS

CHAT, SPEECH, TRANSCRIPTIONS = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"


def conversation(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def with_audio(**audio: Any) -> dict[str, Any]:
    return conversation([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav", **audio}}])


def with_media(kind: str = "image", **fields: Any) -> dict[str, Any]:
    return conversation([{"type": f"{kind}_url", f"{kind}_url": {"url": "https://example.org/a.png", **fields}}])


ROOT = Path(__file__).parents[3]


def codes() -> set[str]:
    """Return the codes of errors that stand in the source: given as ``code``, or to ``bad_request``."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "omni_actors").rglob("*.py")]
    with_codes = [text for text in texts if "code=" in text or "bad_request(" in text]
    nodes = [node for text in with_codes for node in ast.walk(ast.parse(text))]
    constants: dict[str, str] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Constant(str(value))) if name.isupper():
                constants[name] = value
    found = {code for _, code in _STATUSES.values()}
    for node in nodes:
        if isinstance(node, ast.Call):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            given += node.args[2:3] if isinstance(node.func, ast.Name) and node.func.id == "bad_request" else []
            for value in given:
                match value:
                    case ast.Constant(str(code)):
                        found.add(code)
                    case ast.Name(name) if name in constants:
                        found.add(constants[name])
    return found


def test_the_pages_have_every_code() -> None:
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("serving.md", "realtime.md"))
    only_in_python = {"other_nodes", "too_many_parts"}  # updates of weights by tensors
    found = codes()
    assert {"invalid_value", "no_room_for_prompt", "overloaded", "unsupported_parameter"} <= found
    assert {code for code in found if f"`{code}`" not in pages} == only_in_python


BODIES: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    # path, changes to a good body (None: removed), status, param, a part of the message
    (CHAT, {"model": "gpt-4o"}, 404, "model", "studio"),
    (CHAT, {"model": 7}, 400, "model", "text"),
    (CHAT, {"messages": None}, 400, "messages", "missing"),
    (CHAT, {"messages": []}, 400, "messages", ">= 1"),
    (CHAT, {"messages": "hello"}, 400, "messages", "a list"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role", "'assistant'"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages[0].role", "missing"),
    (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, 400, "messages[0].content", "transcript"),
    (CHAT, conversation([{"type": "input_file"}]), 400, "messages[0].content[0].type", "'image_url'"),
    (CHAT, conversation([{"type": "image_url"}]), 400, "messages[0].content[0].image_url", "missing"),
    (
        CHAT,
        conversation([{"type": "image_url", "image_url": "data:"}]),
        400,
        "messages[0].content[0].image_url",
        "a mapping",
    ),
    (CHAT, with_media(detail="low"), 400, "messages[0].content[0].image_url.detail", "'auto', 'high'"),
    (CHAT, with_media(url=""), 400, "messages[0].content[0].image_url.url", ">= 1"),
    (
        CHAT,
        with_media(),
        400,
        "messages[0].content[0].image_url.url",
        "image; accepted: 'audio', 'messages'",
    ),
    (CHAT, with_media("video"), 400, "messages[0].content[0].video_url.url", "does not accept video"),
    (CHAT, conversation([{"type": "text"}]), 400, "messages[0].content[0].text", "missing"),
    (CHAT, with_audio(format="mp4"), 400, "messages[0].content[0].input_audio.format", "'flac'"),
    (CHAT, with_audio(data="###"), 400, "messages[0].content[0].input_audio.data", "base64"),
    (CHAT, with_audio(), 400, "messages[0].content[0].input_audio.data", "not a readable audio file"),
    (CHAT, {"modalities": ["video"]}, 400, "modalities[0]", "'audio'"),
    (CHAT, {"modalities": []}, 400, "modalities", ">= 1"),
    (CHAT, {"audio": {"format": "wma"}}, 400, "audio.format", "'pcm16'"),
    (CHAT, {"stop": list("abcde")}, 400, "stop", "<= 4"),
    (CHAT, {"stream": "yes"}, 400, "stream", "true or false"),
    (CHAT, {"n": 0}, 400, "n", ">= 1"),
    (CHAT, {"n": 129}, 400, "n", "<= 128"),
    (CHAT, {"n": 2, "modalities": ["text", "audio"]}, 400, "n", "accepted: 1"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools[0].function", "missing"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "no stage"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f g"}}]},
        400,
        "tools[0].function.name",
        "expected 1 to 64 letters, digits",
    ),
    (CHAT, {"tool_choice": "must"}, 400, "tool_choice", "'required', a mapping, null"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        400,
        "messages[0].function_call",
        "not supported; accepted: null",
    ),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice", "no tools"),
    (CHAT, {"logprobs": True}, 400, "logprobs", "no stage"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs", "logprobs: true"),
    (CHAT, {"add_special_tokens": True}, 400, "add_special_tokens", "accepted: False"),
    (CHAT, {"presence_penalty": 0.5}, 400, "presence_penalty", "no stage"),
    (CHAT, {"logit_bias": {"1": 2}}, 400, "logit_bias", "no stage"),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format", "no stage"),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format.type", "'json_schema'"),
    (CHAT, {"temprature": 1}, 400, "temprature", "temprature"),
    (CHAT, {"deadline_s": 1000}, 400, "deadline_s", "unknown"),
    (CHAT, {"request_id": "mine"}, 400, "request_id", "unknown"),
    (CHAT, {"self": 1}, 400, "self", "unknown"),
    (CHAT, {"use_audio_in_video": True}, 400, "use_audio_in_video", "no stage"),
    (CHAT, {"mm_processor_kwargs": {"size": 2}}, 400, "mm_processor_kwargs.size", "'use_audio_in_video'"),
    (
        CHAT,
        {"mm_processor_kwargs": {"use_audio_in_video": 1}},
        400,
        "mm_processor_kwargs.use_audio_in_video",
        "true or false",
    ),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens", "'max_tokens'"),
    (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens", "'max_completion_tokens'"),
    (SPEECH, {"model": "tts-1"}, 404, "model", "studio"),
    (SPEECH, {"input": None}, 400, "input", "missing"),
    (SPEECH, {"input": "  "}, 400, "input", "no text"),
    (SPEECH, {"input": "é" * 4097}, 400, "input", "<= 4096"),
    (SPEECH, {"input": "an unspeakable word"}, 400, "input", "cannot be spoken"),
    (SPEECH, {"input": "hush"}, 400, "input", "nothing in this text can be spoken"),
    (SPEECH, {"input": "hush hush", "response_format": "pcm"}, 400, "input", "nothing in this text can be spoken"),
    (SPEECH, {"response_format": "wma"}, 400, "response_format", "'aac', 'flac', 'mp3', 'opus', 'pcm', 'wav'"),
    (SPEECH, {"stream_format": "ndjson"}, 400, "stream_format", "'audio', 'sse'"),
    (SPEECH, {"speed": 0.2}, 400, "speed", ">= 0.25"),
    (SPEECH, {"speed": 4.1}, 400, "speed", "<= 4"),
    (SPEECH, {"input": "hush", "stream_format": "sse"}, 400, "input", "nothing in this text can be spoken"),
    (SPEECH, {"instructions": "whisper"}, 400, "instructions", "not supported"),
]


@pytest.mark.parametrize(("path", "changes", "status", "param", "words"), BODIES)
def test_a_body_that_cannot_be_served(
    studio: Any, path: str, changes: dict[str, Any], status: int, param: str, words: str
) -> None:
    good = {"model": "studio", **(conversation("hello") if path == CHAT else {"input": "hello", "voice": "any"})}
    body = {name: value for name, value in {**good, **changes}.items() if value is not None}
    error = refusal(studio.http.post(path, json=body), status)
    assert error["param"] == param
    assert words in error["message"]
    assert error["code"]


def refusal(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error object of a response, and check its form."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), answer.text
    [(key, error)] = answer.json().items()
    assert (key, set(error)) == ("error", {"message", "type", "param", "code"})
    assert error["message"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return dict(error)


def test_a_speech_of_openais_longest_input(studio: Any) -> None:
    body = {"model": "studio", "input": "é" * 4096, "response_format": "wav"}
    assert studio.http.post(SPEECH, json=body).content.startswith(b"RIFF")


def test_an_engines_name_for_a_field_becomes_the_clients() -> None:
    error = InvalidRequest("max_tokens: expected an integer >= 1; no engine takes 'max_tokens'", param="max_tokens")
    with pytest.raises(HTTPError) as caught, renaming({"max_tokens": "max_completion_tokens"}):
        raise error
    assert caught.value.param == "max_completion_tokens"
    words = "max_completion_tokens: expected an integer >= 1; no engine takes 'max_completion_tokens'"
    assert caught.value.message == words


def test_every_error_of_a_request_has_a_status_and_a_code_of_its_own() -> None:
    unread = to_http_error(SlowConsumer("output_bytes", 1000))
    assert (unread.status, unread.type, unread.code) == (400, "invalid_request_error", "slow_consumer")
    died = WorkerExit(1, "SIGKILL", None)
    failed = StageFailed("mouth", 0, "its restarts ran out", [Death(0, 0.0, died)])
    others = [
        *(Aborted(), Overloaded(1, 1.0), DeadlineExceeded(1.0)),
        TemporarilyRefused("not yet", code="too_early"),
        *(StageUnavailable(failed), StageCrashed("mouth", 0, 0, died), InvalidRequest("no")),
    ]
    codes = [to_http_error(error).code for error in others]
    assert len({*codes, unread.code, "internal_error"}) == len(others) + 2


@pytest.mark.parametrize(
    ("retry_after_s", "message"),
    [
        (None, "stage 'mouth' is not available"),
        (4.6, "stage 'mouth' is not available; it is tried again and may be ready in 5 s"),
    ],
)
def test_why_a_stage_failed_is_for_the_log_and_not_for_clients(retry_after_s: float | None, message: str) -> None:
    reason = "FileNotFoundError: /srv/models/mouth/config.json"
    failed = StageFailed("mouth", 0, reason, [Death(0, 0.0, WorkerExit(1, None, 1))])
    error = to_http_error(StageUnavailable(failed, retry_after_s))
    assert (error.message, error.code) == (message, "stage_unavailable")
    assert error.headers.get("retry-after") == (None if retry_after_s is None else "5")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b'"hello"', b"{'model': 1}"])
@pytest.mark.parametrize("path", [CHAT, SPEECH])
def test_a_body_that_is_not_a_json_object(studio: Any, path: str, body: bytes) -> None:
    assert refusal(studio.http.post(path, content=body), 400)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "file", "status", "param"),
    [
        ({"model": "whisper-1"}, b"RIFF", 404, "model"),
        ({"model": "studio"}, None, 400, "file"),
        ({"model": "studio"}, b"not audio", 400, "file"),
        ({"model": "studio"}, b"", 400, "file"),
        ({"model": "studio", "response_format": "ttml"}, b"RIFF", 400, "response_format"),
        ({"model": "studio", "response_format": "srt", "stream": "true"}, b"RIFF", 400, "response_format"),
        ({"model": "studio", "timestamp_granularities[]": "word"}, b"RIFF", 400, "timestamp_granularities[]"),
        ({"model": "studio", "timestamp_granularities[]": "foo"}, b"RIFF", 400, "timestamp_granularities[]"),
        ({"model": "studio", "prompt": "Dear" * 2000}, b"RIFF", 400, "prompt"),
        ({"model": "studio", "temperature": "0.5"}, b"RIFF", 400, "temperature"),
        ({"model": "studio", "stream": "perhaps"}, b"RIFF", 400, "stream"),
    ],
)
def test_a_form_that_cannot_be_served(
    studio: Any, fields: dict[str, str], file: bytes | None, status: int, param: str
) -> None:
    files = {"file": ("a.wav", file)} if file is not None else {"model": (None, fields["model"])}
    assert refusal(studio.http.post(TRANSCRIPTIONS, data=fields, files=files), status)["param"] == param


def test_the_values_of_a_list_of_a_form_are_named(studio: Any) -> None:
    fields = {"model": "studio", "response_format": "verbose_json", "timestamp_granularities[]": "foo"}
    error = refusal(studio.http.post(TRANSCRIPTIONS, data=fields, files={"file": ("a.wav", b"RIFF")}), 400)
    assert error["message"] == "timestamp_granularities[]: Invalid value 'foo'; accepted: 'segment', 'word'"


def test_a_picture_of_a_pipeline_that_makes_none_is_a_matter_of_the_model(studio: Any) -> None:
    answer = studio.http.post("/v1/images/generations", json={"model": "studio", "prompt": "a cat"})
    assert refusal(answer, 400)["param"] == "model"


def test_an_empty_recording(studio: Any, recording: Callable[..., bytes]) -> None:
    files = {"file": ("a.wav", recording(0.0))}
    error = refusal(studio.http.post(TRANSCRIPTIONS, data={"model": "studio"}, files=files), 400)
    assert "is empty" in error["message"]


def test_a_small_file_of_a_long_silence_is_not_unpacked(studio: Any, recording: Callable[..., bytes]) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(8000 * 601, np.int16), 8000, format="FLAC")
    assert len(file.getvalue()) < 100_000
    files = {"file": ("a.flac", file.getvalue())}
    error = refusal(studio.http.post(TRANSCRIPTIONS, data={"model": "studio"}, files=files), 400)
    assert (error["param"], error["code"]) == ("file", "audio_too_long")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1", 404),
        ("GET", "/v1/images", 404),
        ("POST", "/v1/images", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/gpt-4o", 404),
        ("GET", "/v1/models/openai/gpt-4o", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
    ],
)
def test_a_path_that_does_not_exist(studio: Any, method: str, path: str, status: int) -> None:
    answer = studio.http.request(method, path)
    assert path in refusal(answer, status)["message"] or "does not exist" in answer.text
    assert ("allow" in answer.headers) == (status == 405)


# size


def big(size: int) -> bytes:
    body = {"model": "studio", **conversation("hello"), "user": ""}
    return json.dumps({**body, "user": "x" * (size - len(json.dumps(body)))}).encode()


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(studio: Any, path: str, chunked: bool) -> None:
    """Also without a Content-Length. The next request is served, on the same connection or a new one."""

    body = big(5_000_000)
    pieces = (body[i : i + 100_000] for i in range(0, len(body), 100_000))
    answer = studio.http.post(path, content=pieces if chunked else body)
    assert refusal(answer, 413)["code"] == "body_too_large"
    assert studio.http.get("/v1/models").status_code == 200


def test_a_body_at_the_limit(studio: Any) -> None:
    assert studio.http.post(CHAT, content=big(1_000_000)).status_code == 200
    assert refusal(studio.http.post(CHAT, content=big(1_000_001)), 413)


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
def test_a_client_that_writes_before_it_reads_gets_its_answer(studio: Any, path: str) -> None:
    """The server does not reset the connection while the client writes."""
    with socket.create_connection(("127.0.0.1", studio.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n"
        connection.sendall(head.encode() + bytes(20_000_000))
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_client_that_never_ends_its_body_does_not_affect_others(studio: Any) -> None:
    with socket.create_connection(("127.0.0.1", studio.port)) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode())
        assert studio.http.post(CHAT, json={"model": "studio", **conversation("hello")}).status_code == 200


# keys


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Basic sesame", "sesame", "Bearer séame"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/nothing", CHAT])
def test_a_request_without_the_key_is_refused(slow: Any, header: str | None, path: str) -> None:
    headers = {b"authorization": header.encode()} if header else {}
    method, content = ("POST", b"x" * 2_000_000) if path == CHAT else ("GET", b"")
    with httpx.Client(base_url=slow.url, timeout=60, verify=NO_TLS) as stranger:
        answer = stranger.request(method, path, headers=headers, content=content)
    assert refusal(answer, 401)["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_health_is_open_and_a_key_opens_the_rest(slow: Any) -> None:
    with httpx.Client(base_url=slow.url, timeout=60, verify=NO_TLS) as stranger:
        assert stranger.get("/health").status_code == 200
    with slow.openai() as client:
        assert [model.id for model in client.models.list()] == ["studio"]
    with slow.openai("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_openais_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "hello"}])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    silence = base64.b64encode(b"nothing").decode()
    with pytest.raises(openai.BadRequestError, match="not a readable audio file"):
        client.chat.completions.create(model="studio", **with_audio(data=silence))
