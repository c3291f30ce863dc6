"""Base64 in pieces."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import trio

from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media import base64_data
from omni_actors.serve.media.base64_data import from_base64, to_base64, to_base64_json
from omni_actors.serve.realtime.config import PCM
from omni_actors.serve.realtime.conversation import Entry
from omni_actors.serve.realtime.input_audio import Recording
from omni_actors.serve.realtime.items import Message, Part


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


@pytest.mark.parametrize("work", [_decode, _encode, _retrieve])
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
