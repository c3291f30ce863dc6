"""/v1/chat/completions, as OpenAI's own client sees it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import numpy as np
import openai
import pytest
import soundfile

from omni_actors.outputs import AudioChunk, Output
from omni_actors.serve.api.generations import Generations
from omni_actors.serve.api.schemas import AudioParams, ChatMessage, ChatRequest
from omni_actors.serve.routes.chat_answer import ChatCompletion, events
from tests.support.http_server import Start

HELLO = [{"role": "user", "content": "hello"}]


def ask(client: openai.OpenAI, **arguments: Any) -> Any:
    return client.chat.completions.create(**{"model": "studio", "messages": HELLO, **arguments})


def test_a_whole_answer(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert (answer.object, answer.model) == ("chat.completion", "studio")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content, choice.message.audio) == ("assistant", "hello" * 3, None)


def test_a_streamed_answer(client: openai.OpenAI) -> None:
    first, *rest = list(ask(client, stream=True))
    assert {chunk.id for chunk in rest} == {first.id}
    assert first.object == "chat.completion.chunk"
    assert first.choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in rest] == ["hello", "hello", "hello", None]
    assert [chunk.choices[0].finish_reason for chunk in rest] == [None, None, None, "stop"]


def test_usage_comes_last_when_it_is_asked_for(client: openai.OpenAI) -> None:
    *_, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []


@pytest.mark.parametrize(("format", "rate"), [("wav", 16000), ("pcm16", 24000)])
def test_a_spoken_answer(client: openai.OpenAI, format: str, rate: int) -> None:
    answer = ask(client, modalities=["text", "audio"], audio={"format": format, "voice": "any"})
    message = answer.choices[0].message
    assert message.content is None
    assert message.audio.transcript == "hello" * 3
    assert message.audio.expires_at == answer.created
    seconds = _seconds(base64.b64decode(message.audio.data), format, rate)
    assert seconds == pytest.approx(0.3, abs=0.001)


@pytest.mark.parametrize(("format", "rate"), [("wav", 16000), ("pcm16", 24000)])
def test_a_streamed_spoken_answer(client: openai.OpenAI, format: str, rate: int) -> None:
    chunks = list(ask(client, stream=True, modalities=["text", "audio"], audio={"format": format, "voice": "any"}))
    deltas = [chunk.choices[0].delta.audio for chunk in chunks if chunk.choices[0].delta.audio]
    assert len({delta.id for delta in deltas}) == 1
    assert "".join(delta.transcript or "" for delta in deltas) == "hello" * 3
    assert deltas[-1].expires_at is not None
    sound = b"".join(base64.b64decode(delta.data) for delta in deltas if delta.data)
    assert _seconds(sound, format, rate) == pytest.approx(0.3, abs=0.001)
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_the_client_learns_which_words_have_been_heard_at_the_end_of_each_sentence_if_it_asks_for_it() -> None:
    class Spoken:
        async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
            yield 0, Output("a", "mind", "text", "Go! And then we come.", True, {}, {})
            for sentence in ("Go!", "", "And then we come."):
                named = {"sentence_text": sentence} if sentence else {}
                sound = AudioChunk(np.full(12_000, 0.1, np.float32), 24_000)
                yield 0, Output("a", "mouth", "audio", sound, False, named, {})

    async def ends(**audio: Any) -> list[int | None]:
        """Return ``transcript_end`` of each event of the sound; None: it is a part of the sound."""
        body = ChatRequest(
            model="m",
            messages=[ChatMessage(role="user", content="hi")],
            stream=True,
            audio=AudioParams(format="pcm16", **audio),
        )
        completion = ChatCompletion(body, {}, ("text", "audio"), "chatcmpl-")
        sent = [
            json.loads(event[6:]) async for event in events(completion, cast(Generations, Spoken())) if b"{" in event
        ]
        heard = [chunk["choices"][0]["delta"].get("audio", {}) for chunk in sent]
        sound = [each for each in heard if each.keys() & {"data", "transcript_end", "expires_at"}]
        assert "expires_at" in sound[-1]
        return [each.get("transcript_end") for each in sound]

    assert await ends() == [None, None, None, None]
    assert await ends(word_timing=True) == [None, None, len("Go!"), None, len("Go! And then we come.")]


async def test_a_streamed_spoken_answer_has_its_log_probabilities() -> None:
    """Also those of a token without text."""

    class Written:
        async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
            for token in ("hel", "", "lo"):
                chosen = {"token_id": 1, "logprob": -0.5, "rank": 1, "token": token}
                yield 0, Output("a", "mind", "text", token or None, token == "lo", {"logprobs": [[chosen]]}, {})

    body = ChatRequest(model="m", messages=[ChatMessage(role="user", content="hi")], stream=True, logprobs=True)
    completion = ChatCompletion(body, {}, ("text", "audio"), "chatcmpl-")
    sent = [json.loads(event[6:]) async for event in events(completion, cast(Generations, Written())) if b"{" in event]
    choices = [chunk["choices"][0] for chunk in sent]
    assert "".join(choice["delta"].get("audio", {}).get("transcript", "") for choice in choices) == "hello"
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == ["hel", "", "lo"]
    assert not any(choice["delta"].get("content") for choice in choices)


def test_the_words_of_a_spoken_answer_are_those_of_its_text_alone(start: Start) -> None:
    """The last stage of "echo" is one for sound, and repeats the text."""
    with start(config="echo") as server, server.openai() as client:
        answer = ask(client, model="echo", modalities=["text", "audio"], audio={"format": "wav", "voice": "any"})
        assert answer.choices[0].message.audio.transcript == "hello"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("format", ["wav", "pcm16"])
def test_an_answer_without_audio_still_has_its_text(client: openai.OpenAI, format: str, stream: bool) -> None:
    spoken = {"modalities": ["text", "audio"], "audio": {"format": format, "voice": "any"}}
    answer = ask(client, messages=[{"role": "user", "content": "hush"}], stream=stream, **spoken)
    if stream:
        deltas = [chunk.choices[0].delta.audio for chunk in answer if chunk.choices[0].delta.audio]
        text = "".join(delta.transcript or "" for delta in deltas)
        sound = b"".join(base64.b64decode(delta.data) for delta in deltas if delta.data)
    else:
        audio = answer.choices[0].message.audio
        text, sound = audio.transcript, base64.b64decode(audio.data)
    assert text == "hush" * 3
    assert _seconds(sound, format, 24000) == 0


def _seconds(data: bytes, format: str, rate: int) -> float:
    if format == "wav":
        samples, found = soundfile.read(io.BytesIO(data))
        assert found == rate
        return len(samples) / rate
    return len(data) / 2 / rate


@pytest.mark.parametrize(("format", "rate"), [("wav", 8000), ("flac", 44100), ("ogg", 48000), ("mp3", 24000)])
def test_a_spoken_question(client: openai.OpenAI, recording: Callable[..., bytes], format: str, rate: int) -> None:
    data = base64.b64encode(recording(1.0, rate, format.upper(), channels=2)).decode()
    parts = [{"type": "text", "text": "hm?"}, {"type": "input_audio", "input_audio": {"data": data, "format": format}}]
    content = ask(client, messages=[{"role": "user", "content": parts}]).choices[0].message.content
    # An MP3 comes back a little longer than it was.
    assert f" s at {rate} Hz" in content
    assert "1.0 s" in content or "1.1 s" in content
    assert "hm?" in content


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    answer = ask(
        client,
        n=1,
        user="anyone",
        metadata={"a": "b"},
        presence_penalty=0,
        frequency_penalty=0.0,
        logprobs=False,
        tools=[],
        response_format={"type": "text"},
        extra_body={"add_special_tokens": False},
        seed=None,
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}],
    )
    assert answer.choices[0].message.content == "hello" * 3


def test_a_call_in_openais_older_form_is_refused(client: openai.OpenAI) -> None:
    call = {"name": "weather", "arguments": "{}"}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[*HELLO, {"role": "assistant", "content": "", "function_call": call}, *HELLO])
    assert caught.value.param == "messages[1].function_call"
    answered = {"role": "assistant", "content": "hi", "function_call": None}
    assert ask(client, messages=[*HELLO, answered, *HELLO]).choices[0].message.content == "hello" * 3


@pytest.mark.parametrize(
    ("path", "field"), [("chat/completions", "messages"), ("completions", "prompt"), ("responses", "input")]
)
def test_a_bad_session_is_an_error_about_its_header(client: openai.OpenAI, path: str, field: str) -> None:
    body = {"model": "studio", field: HELLO if field == "messages" else "hello"}
    for name in ("", "a" * 257):
        with pytest.raises(openai.BadRequestError) as caught:
            client.post(f"/{path}", body=body, cast_to=object, options={"headers": {"X-Session-ID": name}})
        assert caught.value.param == "X-Session-ID"
        assert "X-Session-ID: expected a string of 1 to 256 characters" in str(caught.value)
