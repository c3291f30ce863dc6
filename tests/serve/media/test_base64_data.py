"""Base64 in pieces."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import msgspec
import numpy as np
import pytest
import trio

from omni_actors.generation import Generation
from omni_actors.outputs import AudioChunk, Output
from omni_actors.serve.api.generations import Generations
from omni_actors.serve.api.schemas import ChatMessage, ChatRequest
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media import base64_data
from omni_actors.serve.media.audio import AudioEncoder
from omni_actors.serve.media.base64_data import from_base64, to_base64, to_base64_json
from omni_actors.serve.realtime.config import PCM
from omni_actors.serve.realtime.conversation import Entry
from omni_actors.serve.realtime.input_audio import Recording
from omni_actors.serve.realtime.items import Message, Part
from omni_actors.serve.routes import speech
from omni_actors.serve.routes.chat_answer import ChatCompletion, whole_response


@pytest.mark.parametrize("size", [0, 1, 2, 3, 3 << 18, (3 << 18) + 1, (6 << 18) - 1, 6 << 18])
async def test_base64_is_decoded_in_pieces_to_the_same(size: int) -> None:
    data = os.urandom(size)
    assert await from_base64("begin," + to_base64(data), "p", len("begin,")) == data


@pytest.mark.parametrize("text", ["AAAA", "AAAAAA==", "AAAAAAA=", "AAAAAAAA", "AAAAAAAAAA==", "AAAAAAAAAAAAAAA="])
async def test_padding_at_the_end(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base64_data, "_PIECE", 8)
    assert await from_base64(text, "p") == bytes(len(text) // 4 * 3 - text.count("="))


@pytest.mark.parametrize(
    "text", ["A", "AAA", "AAAAAAA=AAAA", "AAAAAA==AAAA", "AAAAAA==AAAAAA==", "AAAA=AAA", "AAAAAAAA===="]
)
async def test_padding_anywhere_else(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a piece ends with it."""
    monkeypatch.setattr(base64_data, "_PIECE", 8)
    with pytest.raises(HTTPError, match="not base64"):
        await from_base64(text, "p")


@pytest.mark.parametrize("size", [0, 1, 2, 3, 3 << 18, (3 << 18) + 1, (6 << 18) - 1, 6 << 18])
async def test_base64_is_encoded_in_pieces_to_the_same(size: int) -> None:
    data = os.urandom(size)
    assert msgspec.json.encode([await to_base64_json(data)]) == msgspec.json.encode([to_base64(data)])


async def _decode() -> None:
    await from_base64(to_base64(bytes(6 << 20)), "p")


async def _encode() -> None:
    await to_base64_json(bytes(6 << 20))


async def _retrieve() -> None:
    entry = Entry(Message(role="user", content=[Part("input_audio")]), {0: Recording(bytes(6 << 20), PCM())})
    assert len(msgspec.json.encode(await entry.retrieved())) > 8 << 20


class _Spoken:
    """A generation, or the generations of a response, with a short sound."""

    async def __aiter__(self) -> AsyncIterator[Output]:
        yield Output("a", "mouth", "audio", AudioChunk(np.zeros(24, np.float32), 24_000), True, {}, {})

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        async for output in self:
            yield 0, output


class _FlacEncoder:
    """Its file is large, and it makes it at once."""

    async def push(self, chunk: AudioChunk) -> bytes:
        return b""

    async def finish(self) -> bytes:
        return bytes(6 << 20)


async def _answer_with_a_file() -> None:
    body = ChatRequest(model="m", messages=[ChatMessage(role="user", content="hi")])
    completion = ChatCompletion(body, {}, ("text", "audio"), "chatcmpl-")
    completion.encoder = cast(AudioEncoder, _FlacEncoder())
    answer = await whole_response(completion, cast(Generations, _Spoken()))
    audio = msgspec.json.decode(answer.body)["choices"][0]["message"]["audio"]
    assert audio["data"] == to_base64(bytes(6 << 20))


async def _speak_a_file_as_an_event() -> None:
    sent = speech._events(cast(Generation, _Spoken()), cast(AudioEncoder, _FlacEncoder()), None)
    first, _ = [msgspec.json.decode(event.removeprefix(b"data: ")) async for event in sent]
    assert first == {"type": "speech.audio.delta", "audio": to_base64(bytes(6 << 20))}


@pytest.mark.parametrize("work", [_decode, _encode, _retrieve, _answer_with_a_file, _speak_a_file_as_an_event])
async def test_others_are_served_while_a_large_file_is_decoded_or_encoded(work: Callable[[], Awaitable[None]]) -> None:
    turns, done = 0, False

    async def other() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await work()
        done = True
    assert turns >= 7
