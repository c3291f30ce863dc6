"""A recording of several windows of 30 s."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

RATE = 24_000
"""Samples a second."""
WINDOWS = (
    ("The capital of France is Paris.", "Seven ships came home.", "The sky is blue today.", "My brother plays piano."),
    ("We will meet on Friday morning.",),
    ("The train leaves from the old station.",),
    ("She bought apples and bread.",),
)
"""The sentences of each window."""
_PAUSE_S, _LONG_PAUSE_S = 6, 33


@functools.cache
def long_recording() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the recording: float32 (n,). Each sentence differs from the others."""
    from hibari import Hibari

    voice, parts = Hibari(threads=1), []
    for number, sentences in enumerate(WINDOWS):
        for sentence in sentences:
            parts += [voice(sentence, seed=0), np.zeros(_PAUSE_S * RATE, np.float32)]
        if number == 1:
            parts.append(np.zeros((_LONG_PAUSE_S - _PAUSE_S) * RATE, np.float32))
    sound = np.concatenate(parts)
    # Digital silence would depend on the loudest sound, which is not known while a recording arrives.
    noise = 1e-3 * np.random.default_rng(0).standard_normal(len(sound))
    return (sound + noise).astype(np.float32)
