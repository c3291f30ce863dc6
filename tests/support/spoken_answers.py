"""Ask a system for text and speech, and read the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from omni_actors import AudioChunk
from omni_actors.generation import Generation
from omni_actors.outputs import Output

STORY = "please tell me a short story about the sea ."
SPOKEN: dict[str, Any] = {
    "modalities": ("text", "audio"),
    "max_tokens": 24,
    "talker_max_tokens": 61,
    "talker_temperature": 0.0,
}


async def read(generation: Generation, on_audio: Callable[[], None] = lambda: None, *, behind: int = 0) -> list[Output]:
    """on_audio: called once, at the first sound behind ``behind`` others."""
    outputs = []
    async for out in generation:
        assert out.delta is not None or out.data or out.finished, "an output of nothing"
        outputs.append(out)
        if isinstance(out.delta, AudioChunk):
            if behind == 0:
                on_audio()
            behind -= 1
    return outputs


def text_of(outputs: Sequence[Output]) -> str:
    return "".join(out.delta for out in outputs if isinstance(out.delta, str))


def sound_of(outputs: Sequence[Output]) -> np.ndarray[Any, Any]:
    samples = [out.delta.samples for out in outputs if isinstance(out.delta, AudioChunk)]
    return np.concatenate([np.zeros(0, np.float32), *samples])
