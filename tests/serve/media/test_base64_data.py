"""Decoding base64 in pieces."""

from __future__ import annotations

import os

import pytest
import trio

from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media import base64_data
from omni_actors.serve.media.base64_data import from_base64, to_base64


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


async def test_others_are_served_while_a_large_file_is_decoded() -> None:
    text, turns, done = to_base64(bytes(6 << 20)), 0, False

    async def other() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await from_base64(text, "p")
        done = True
    assert turns >= 7
