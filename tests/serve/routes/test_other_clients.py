"""What clients of vLLM, vLLM-Omni and SGLang-Omni send, with the same fields, as they would send it here."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.conftest import Gallery
from tests.support.http_server import Server

HELLO: Any = [{"role": "user", "content": "hello"}]
UNCHANGED: dict[str, Any] = {
    "add_generation_prompt": True,
    "bad_words": [],
    "chat_template_kwargs": {},
    "continue_final_message": False,
    "documents": [],
    "early_stopping": False,
    "echo": False,
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "media_io_kwargs": {},
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}
"""Fields of vLLM with the values that it has by default."""


@pytest.fixture
def viewer(gallery: Gallery) -> Iterator[openai.OpenAI]:
    with gallery.server.openai() as client:
        yield client


@pytest.fixture
def author(writer: Server) -> Iterator[openai.OpenAI]:
    with writer.openai() as client:
        yield client


def reported(client: openai.OpenAI, name: str, messages: Any = HELLO, **arguments: Any) -> list[Any]:
    """Return what the pipeline of the gallery reports of this name."""
    answer = client.chat.completions.create(model="gallery", messages=messages, **arguments)
    lines = [json.loads(line) for line in (answer.choices[0].message.content or "").splitlines()]
    return [line[name] for line in lines if name in line]


def refused(client: openai.OpenAI, messages: Any = HELLO, **arguments: Any) -> Any:
    """Return the error of a chat."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "gallery", "messages": messages, **arguments})
    return caught.value


def heard(part: dict[str, Any]) -> Any:
    return [{"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}]


# the model


def test_a_server_of_one_pipeline_needs_no_model(studio: Server, recording: Callable[..., bytes]) -> None:
    answer = studio.http.post("/v1/chat/completions", json={"messages": HELLO})
    assert (answer.status_code, answer.json()["model"]) == (200, "studio")
    for path, body in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/audio/speech", {"input": "la", "voice": "vivian"}),
    ):
        assert studio.http.post(path, json=body).status_code == 200, path
    file = {"file": ("sound.wav", recording())}
    assert studio.http.post("/v1/audio/transcriptions", files=file).status_code == 200


# sound behind a URL


def test_a_sound_behind_a_url_is_heard_as_one_in_the_body(
    viewer: openai.OpenAI, gallery: Gallery, recording: Callable[..., bytes]
) -> None:
    data = recording()
    text = base64.b64encode(data).decode()
    file: Path = gallery.folder / "sound.wav"
    file.write_bytes(data)
    ways: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{text}", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{text}"}},
        {"type": "audio_url", "audio_url": {"url": file.as_uri()}},
    ]
    digests = [reported(viewer, "digest", heard(way)) for way in ways]
    assert len(digests[0]) == 1
    assert digests == [digests[0]] * len(ways)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("https://example.org/a.wav", "invalid_audio_url"),
        ("file:///etc/passwd", "audio_file_not_found"),
        ("data:image/png;base64,AAAA", "unsupported_audio_media_type"),
        ("data:audio/wav;base64,", "empty_audio_file"),
        ("data:audio/wav;base64,AAAA", "invalid_audio"),
        ("AAAA", "invalid_audio_url"),
    ],
)
def test_a_url_without_a_sound(viewer: openai.OpenAI, url: str, code: str) -> None:
    error = refused(viewer, heard({"type": "audio_url", "audio_url": {"url": url}}))
    assert (error.param, error.code) == ("messages[0].content[0].audio_url.url", code)


def test_a_data_url_without_a_type_in_the_field_for_base64(viewer: openai.OpenAI) -> None:
    error = refused(viewer, heard({"type": "input_audio", "input_audio": {"data": "data:;base64,AA", "format": "mp3"}}))
    assert (error.param, error.code) == ("messages[0].content[0].input_audio.data", "unsupported_audio_media_type")
