"""An engine outside the registry gets what docs/pipelines.md says."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np

from omni_actors import AudioChunk, OmniSystem
from omni_actors.config import Pipeline, Stage
from omni_actors.media import VideoClip

KINDS = ("messages", "script", "audio", "image", "video")
OWN = Pipeline(
    name="own", stages={"tell": Stage(engine="tests.support.describing_engine:Describe", accepts=KINDS, emits="text")}
)
SOUND = AudioChunk(np.zeros(4, np.float32), 8_000)


async def parts() -> AsyncIterator[str]:
    yield "One."


async def test_the_chunks_of_a_client_are_those_of_the_table() -> None:
    pixels = np.zeros((2, 3, 3), np.uint8)
    media = {"audio": SOUND, "image": [pixels, b"file"], "video": VideoClip(pixels[None], 2.0, SOUND)}
    async with OmniSystem.open(OWN) as omni:
        told = [
            await omni.generate("Hi", multi_modal_data=media).text(),
            await omni.generate({"prompt": "Hi"}).text(),
            await omni.generate({"prompt_token_ids": [1, 2]}).text(),
            await omni.generate({"prompt_embeds": np.zeros((2, 3), np.float32)}).text(),
            await omni.generate(script=parts()).text(),
        ]
    content = [
        *({"type": kind, "index": i} for kind, i in (("audio", 0), ("image", 0), ("image", 1), ("video", 0))),
        {"type": "text", "text": "Hi"},
    ]
    clip = {"index": 0, "fps": 2.0, "sample_rate": 8000}
    assert sorted("".join(told).splitlines()) == sorted(
        [
            "client: {'sample_rate': 8000, 'index': 0} {'audio': 'float32 (4,)'}",
            "client: {'index': 0} {'image': 'uint8 (2, 3, 3)'}",
            "client: {'index': 1} {'encoded_image': 'uint8 (4,)'}",
            f"client: {clip} {{'video': 'uint8 (1, 2, 3, 3)', 'audio': 'float32 (4,)'}}",
            f"client: {{'messages': [{{'role': 'user', 'content': {content}}}]}} {{}}",
            "client: {'prompt': 'Hi'} {}",
            "client: {} {'token_ids': 'int64 (2,)'}",
            "client: {} {'embeds': 'float32 (2, 3)'}",
            "client: {'text': 'One.'} {}",
            "client: {} {}",
        ]
    )
