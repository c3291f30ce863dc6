"""JSON with pictures."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import trio

from omni_actors.outputs import Output, Picture
from omni_actors.serve.api.generations import Generations
from omni_actors.serve.api.image_schemas import ImageRequest
from omni_actors.serve.api.schemas import ChatMessage, ChatRequest
from omni_actors.serve.media import picture_json
from omni_actors.serve.media.base64_data import to_base64
from omni_actors.serve.media.picture_json import PictureText
from omni_actors.serve.routes import chat_answer, images

PIXELS = np.random.default_rng(0).integers(0, 256, (600, 800, 3), np.uint8)
"""As noise, its file is as large as its pixels: 1.4 MB."""


@pytest.mark.parametrize("size", [0, 1, 2, 3, (3 << 18) - 1, 3 << 18, (3 << 18) + 1, 6 << 18])
async def test_pictures_become_the_strings_of_base64(size: int) -> None:
    files = [os.urandom(size), b"ab"]
    first, second = map(PictureText, files)
    found = await picture_json.encode({"a": [first, {"é": second}], "b": 1}, b"begin ", b" end")
    expected = {"a": [to_base64(files[0]), {"é": to_base64(files[1])}], "b": 1}
    assert found == b"begin " + msgspec.json.encode(expected) + b" end"
    assert await picture_json.encode(PictureText(b"ab", "data:,")) == b'"data:,YWI="'
    assert await picture_json.encode([1]) == b"[1]"


async def test_what_json_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="JSON has no object"):
        await picture_json.encode([object()])


class _Drawn:
    """The generations of a response, with three pictures."""

    count = 3

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        for index in (2, 0, 1):
            yield index, Output("a", "painter", "image", Picture(PIXELS), True, {}, {})


def _drawing(**asked: Any) -> images._Drawing:
    return images._Drawing(ImageRequest(model="m", prompt="p", **asked), "image_generation", "prompt")


def _chat() -> chat_answer.ChatCompletion:
    body = ChatRequest(model="m", messages=[ChatMessage(role="user", content="hi")], n=3)
    return chat_answer.ChatCompletion(body, {}, ("image",), "chatcmpl-")


DRAWN = cast(Generations, _Drawn())


async def _whole() -> list[bytes]:
    return [bytes((await images._whole(_drawing(), DRAWN)).body)]


async def _streamed() -> list[bytes]:
    return [event async for event in images._events(_drawing(stream=True), DRAWN)]


async def _answered() -> list[bytes]:
    return [bytes((await chat_answer.whole_response(_chat(), DRAWN)).body)]


async def _answered_in_a_stream() -> list[bytes]:
    return [event async for event in chat_answer.events(_chat(), DRAWN)]


@pytest.mark.parametrize("make", [_whole, _streamed, _answered, _answered_in_a_stream])
async def test_no_picture_is_encoded_in_the_event_loop(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec gets the objects without the pictures, and their bytes are put in by another thread."""
    real, sizes = msgspec.json.encode, []

    def encode(data: Any, **options: Any) -> bytes:
        made = real(data, **options)
        sizes.append(len(made))
        return made

    joining: list[bool] = []
    run_sync = trio.to_thread.run_sync

    async def run(work: Any, *arguments: Any, **options: Any) -> Any:
        joining.append(isinstance(getattr(work, "__self__", None), bytes))
        return await run_sync(work, *arguments, **options)

    monkeypatch.setattr(msgspec.json, "encode", encode)
    monkeypatch.setattr(trio.to_thread, "run_sync", run)
    made = await make()
    assert sum(map(len, made)) > 3 * 1_400_000 * 4 // 3
    assert max(sizes) < 10_000
    assert sum(joining) == (1 if len(made) == 1 else 3)
