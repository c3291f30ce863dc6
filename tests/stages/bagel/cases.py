"""The requests whose results the public reference computed once (``make_reference.py``). Imports numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np

SEED = 5
WORDS = "hello, what are you and the sea"
THINK = "the sea you hear"


def picture(seed: int, height: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A picture of soft colours, uint8 (height, width, 3)."""
    rows, columns = np.mgrid[0:height, 0:width] / 16
    waves = [np.sin(rows * (1 + channel) + seed) * np.cos(columns + channel * seed) for channel in range(3)]
    return (127 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)


FIRST, SECOND = ("picture", 1, 48, 64), ("picture", 2, 30, 40)
"""Seed, height and width. The second one is enlarged."""

PICTURES: dict[str, dict[str, Any]] = {
    "plain": {"terms": [WORDS], "guidance": 1.0, "image_guidance": 1.0, "size": (48, 64)},
    "text guidance": {"terms": [WORDS], "guidance": 4.0, "image_guidance": 1.0, "size": (48, 64), "from": 0.4},
    "both guidances of a text": {
        "terms": [THINK, WORDS],
        "guidance": 3.0,
        "image_guidance": 1.5,
        "size": (40, 32),
        "renorm": "channel",
        "renorm_min": 0.2,
    },
    "edit": {"terms": [FIRST, WORDS], "guidance": 4.0, "image_guidance": 2.0, "renorm": "text_channel"},
    "edit without image guidance": {
        "terms": [SECOND, WORDS],
        "guidance": 4.0,
        "image_guidance": 1.0,
        "renorm": "text_channel",
    },
    "interleaved": {"terms": [FIRST, WORDS, SECOND, THINK], "guidance": 4.0, "image_guidance": 2.0, "from": 0.4},
    "thought": {
        "terms": [WORDS],
        "guidance": 4.0,
        "image_guidance": 1.5,
        "size": (32, 32),
        "think": True,
    },
}
"""Requests for a picture. Terms: texts and pictures, in order. size: height and width."""
STEPS = 4
SHIFT = 3.0
TEXTS: dict[str, list[Any]] = {
    "question": [WORDS],
    "picture and question": [FIRST, WORDS],
    "interleaved question": [FIRST, WORDS, SECOND, THINK],
}
"""Requests for a text."""
TOKENS = 12
"""Tokens of each text."""
