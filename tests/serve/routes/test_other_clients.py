"""What clients of vLLM, vLLM-Omni and SGLang-Omni send, with the same fields, as they would send it here."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from omni_actors.config import load
from omni_actors.serve.api.schemas import effective
from omni_actors.serve.http.errors import HTTPError
from tests.serve.conftest import GALLERY, Gallery
from tests.support.http_server import Server, Start

HELLO: Any = [{"role": "user", "content": "hello"}]
UNCHANGED: dict[str, Any] = {
    "add_generation_prompt": True,
    "bad_words": [],
    "chat_template_kwargs": {},
    "continue_final_message": False,
    "documents": [],
    "early_stopping": False,
    "echo": False,
    "embed_dtype": "float32",
    "enable_response_messages": False,
    "endianness": "native",
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "media_io_kwargs": {},
    "mm_payload": "tensors",
    "priority": 0,
    "return_token_ids": False,
    "return_token_offsets": False,
    "return_tokens_as_token_ids": False,
    "routed_experts_prompt_start": 0,
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


# parameters


def test_defaults_of_vllms_fields_change_nothing(viewer: openai.OpenAI) -> None:
    assert reported(viewer, "params", extra_body=UNCHANGED) == [{}]


def test_a_client_has_no_say_in_its_priority(author: openai.OpenAI) -> None:
    error = refused(author, model="writer", extra_body={"priority": -1})
    assert (error.param, error.code) == ("priority", "unsupported_parameter")


@pytest.mark.parametrize("name", [name for name, value in UNCHANGED.items() if isinstance(value, bool)])
def test_other_values_of_vllms_fields_are_refused_by_name(author: openai.OpenAI, name: str) -> None:
    error = refused(author, model="writer", extra_body={name: not UNCHANGED[name]})
    assert error.param == name
    assert name in error.message


def test_zero_counts_where_the_pipeline_has_another_default(start: Start) -> None:
    config = GALLERY.replace("emits: text", "emits: text, defaults: {presence_penalty: 1.5}")
    with start(config=config) as server, server.openai() as client:
        assert reported(client, "params") == [{"presence_penalty": 1.5}]
        assert reported(client, "params", presence_penalty=0, frequency_penalty=0) == [{"presence_penalty": 0}]


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("extra_body", {"seed": 1}, "in the body itself"),
        ("sampling_params_list", [{"temperature": 0.4}], "talker_temperature"),
        ("sampling_params", {"mind": {"temperature": 0.4}}, "talker_temperature"),
        ("stage_sampling", {"mind": {"temperature": 0.4}}, "talker_temperature"),
        ("audios", ["a.wav"], "'audio_url'"),
        ("images", ["a.png"], "'image_url'"),
        ("guided_choice", ["yes", "no"], "structured_outputs: {'choice': …}"),
        ("guided_json", {"type": "object"}, "structured_outputs: {'json': …}"),
        ("request_id", "a", "X-Request-ID"),
        ("session_id", "a", "X-Session-ID"),
    ],
)
def test_a_field_of_another_name_is_refused_with_the_name_here(
    writer: Server, name: str, value: Any, instead: str
) -> None:
    """Sent as curl does it: OpenAI's client has an argument of its own that is called extra_body."""
    body = {"model": "writer", "messages": HELLO, name: value}
    answer = writer.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, name, "unknown_parameter")
    assert f"{name!r}; send " in error["message"]
    assert instead in error["message"]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("num_inference_steps", "steps"),
        ("guidance_scale", "guidance"),
        ("true_cfg_scale", "guidance"),
        ("height", "size"),
        ("width", "size"),
    ],
)
def test_a_parameter_of_pictures_has_its_name_here_where_pictures_are_made(name: str, instead: str) -> None:
    with pytest.raises(HTTPError, match=f"'{name}'; send {instead}$") as caught:
        effective({name: 4}, load("shapes"))
    assert caught.value.param == name
    assert effective({name: 4}, load("echo")) == {name: 4}, "the engines say what they do not take"


def test_minus_one_means_no_limit_of_rank(author: openai.OpenAI) -> None:
    def answer(top_k: int) -> Any:
        asked: Any = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "extra_body": {"top_k": top_k}}
        return author.chat.completions.create(model="writer", messages=HELLO, **asked).choices

    assert answer(-1) == answer(0) != answer(1)


def test_arguments_of_the_processor_reach_the_pipeline(viewer: openai.OpenAI) -> None:
    given = {"min_pixels": 784, "max_pixels": 100_352, "fps": 1.5}
    kwargs = {**given, "use_audio_in_video": True}
    params = reported(viewer, "params", extra_body={"mm_processor_kwargs": kwargs})
    assert params == [{"use_audio_in_video": True, "mm_processor_kwargs": given}]
    error = refused(viewer, extra_body={"mm_processor_kwargs": {"size": 1}})
    assert (error.param, error.code) == ("mm_processor_kwargs.size", "unknown_parameter")


def test_the_processors_fields_in_a_part_are_refused(viewer: openai.OpenAI) -> None:
    """They were ignored, though they change what the model sees."""
    for kind, fields in (("image", ["min_pixels", "max_pixels"]), ("video", ["min_pixels", "max_pixels", "fps"])):
        for field in fields:
            part = {"type": f"{kind}_url", f"{kind}_url": {"url": "data:,"}, field: 784}
            assert refused(viewer, heard(part)).param == f"messages[0].content[0].{field}"


@pytest.mark.parametrize("field", [{"pooling": "mean"}, {"normalize": True}])
def test_fields_of_embeddings_are_none_of_answers(author: openai.OpenAI, field: dict[str, Any]) -> None:
    """With a pooling, the answer was empty."""
    error = refused(author, model="writer", extra_body=field)
    assert (error.param, error.code) == (next(iter(field)), "unknown_parameter")
    with pytest.raises(openai.BadRequestError):
        author.completions.create(model="writer", prompt="hello", extra_body=field)


def test_a_client_names_an_adapter_and_loads_none(author: openai.OpenAI) -> None:
    error = refused(author, model="writer", extra_body={"lora": {"name": "style", "path": "/adapters/style"}})
    assert error.param == "lora"
    assert "the server's operator loads adapters" in error.message


@pytest.mark.parametrize("adds", [True, False])
def test_special_tokens_of_embeddings(author: openai.OpenAI, adds: bool) -> None:
    """The tokenizer of the tiny model adds none."""
    asked = {"add_special_tokens": adds}
    found = [author.embeddings.create(model="writer", input="hello", extra_body=each) for each in ({}, asked)]
    assert found[0].data == found[1].data


def test_special_tokens_are_left_out_also_where_the_tokenizer_has_other_arguments(gallery: Gallery) -> None:
    cut = {"truncation": True, "max_length": 4}
    for given, used in ((cut, {"add_special_tokens": False, **cut}), ({"add_special_tokens": True}, None)):
        body = {"prompt": "hello", "add_special_tokens": False, "tokenization_kwargs": given}
        text = gallery.server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert json.loads(text.splitlines()[0])["params"] == {"tokenization_kwargs": used or given}


def test_tokenize_takes_the_defaults_of_vllms_fields(writer: Server) -> None:
    more = {"continue_final_message": False, "chat_template_kwargs": {}}
    tokens = [writer.http.post("/tokenize", json={"messages": HELLO, **each}).json()["tokens"] for each in ({}, more)]
    assert tokens[0] == tokens[1] != []


# speech


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "stream_format": "sse"}])
def test_a_stream_of_speech_has_events(studio: Server, fields: dict[str, Any]) -> None:
    body = {"input": "la", "voice": "vivian", "response_format": "pcm", **fields}
    answer = studio.http.post("/v1/audio/speech", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    kinds = [json.loads(line.removeprefix("data: "))["type"] for line in answer.text.splitlines() if line]
    assert {"speech.audio.delta", "speech.audio.done"} == set(kinds)


@pytest.mark.parametrize("fields", [{"stream": False}, {"stream": True, "stream_format": "audio"}, {}])
def test_a_stream_of_speech_that_is_the_file(studio: Server, fields: dict[str, Any]) -> None:
    body = {"input": "la", "voice": "vivian", "response_format": "pcm", **fields}
    answer = studio.http.post("/v1/audio/speech", json=body)
    assert answer.headers["content-type"] == "audio/pcm"
