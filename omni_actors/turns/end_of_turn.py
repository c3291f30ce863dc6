"""The two rules by which a pause ends a turn: after a fixed silence, or when a model finds that the user has finished.

A rule gets every window of the stream (``add``). In a pause, the detector asks it after every window whether the turn
has ended (``has_ended``).
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from omni_actors.turns import completion
from omni_actors.turns.log_mel import SAMPLES, Floats
from omni_actors.turns.settings import Eagerness
from omni_actors.turns.silero import SAMPLE_RATE, WINDOW

_WINDOW_S = WINDOW / SAMPLE_RATE


class EndOfTurn(Protocol):
    """A rule by which a turn ends."""

    def add(self, window: Floats) -> None:
        """Take the next window of the stream, float32 (512,), before it is asked about."""

    def has_ended(self, turn: int, pause: int) -> bool:
        """Return whether the pause ends the turn. turn, pause: how many windows ago each began, at least 1."""


class FixedSilence:
    """A turn ends with a silence of ``silence_ms`` milliseconds."""

    def __init__(self, silence_ms: int) -> None:
        self._windows = max(1, int(silence_ms / 1000 / _WINDOW_S))

    def add(self, window: Floats) -> None:
        """Keep nothing."""

    def has_ended(self, turn: int, pause: int) -> bool:
        """Return whether the silence is long enough. It began before the pause's first window, so this rounds down."""
        return pause >= self._windows


_PROBABILITY: dict[Eagerness, float] = {"low": 0.8, "medium": 0.5, "auto": 0.5, "high": 0.3}
"""From which probability the user has finished."""
_LONGEST_PAUSE_S: dict[Eagerness, float] = {"low": 8, "medium": 4, "auto": 4, "high": 2}
"""The pause that ends a turn in any case, as in OpenAI's protocol."""
FIRST_CHECK = 6
"""The number of windows in a pause after which the model is asked (0.19 s)."""
FIRST_END = 9
"""A pause ends a turn when it has this many windows (0.29 s) or more, because pauses at commas are mostly shorter. The
model computes while the sound between ``FIRST_CHECK`` and here arrives. From here on, it is asked again each time that
the pause has doubled."""
_BEFORE_SPEECH = 16
"""How many windows before the speech the model gets: 0.5 s, as in its training."""
_REFILL_WINDOWS = 85
"""One check may be made every 2.7 s on average, so that the model takes at most 1.7 % of a core."""
_MOST_CHECKS = 8
"""How many checks may be made in a row."""


class Completion:
    """A turn ends when the model of ``completion`` finds it finished, or with a long pause.

    The model is asked at most once every 2.7 s of sound on average, 8 times in a row. A pause in which it may not be
    asked yet is judged as soon as it may.

    Raises assets.ModelNotFound: pipecat-ai is not installed.
    """

    def __init__(self, eagerness: Eagerness) -> None:
        completion.load()
        self._threshold = _PROBABILITY[eagerness]
        self._longest = math.ceil(_LONGEST_PAUSE_S[eagerness] / _WINDOW_S)
        self._recent = np.zeros((SAMPLES // WINDOW, WINDOW), np.float32)
        self._count = 0
        self._credit = float(_MOST_CHECKS)
        self._next_check = FIRST_CHECK
        self._is_finished = False
        """The latest answer of the model in this pause."""

    def add(self, window: Floats) -> None:
        """Keep the window for 8 seconds of sound."""
        self._recent[self._count % len(self._recent)] = window
        self._count += 1
        self._credit = min(self._credit + 1 / _REFILL_WINDOWS, _MOST_CHECKS)

    def has_ended(self, turn: int, pause: int) -> bool:
        """Return whether the user has finished. It takes 0 or about 40 ms."""
        if pause == 1:
            self._next_check, self._is_finished = FIRST_CHECK, False
        if pause >= self._longest:
            return True
        if pause >= self._next_check and self._credit >= 1:
            self._next_check = 2 * max(pause, FIRST_END)
            self._credit -= 1
            probability = completion.completion_probability(self._last(turn + _BEFORE_SPEECH))
            self._is_finished = probability >= self._threshold
        return self._is_finished and pause >= FIRST_END

    def _last(self, count: int) -> Floats:
        """Return the last ``count`` windows of the stream, joined; fewer if fewer are there."""
        count = min(count, self._count, len(self._recent))
        rows = np.arange(self._count - count, self._count) % len(self._recent)
        return self._recent[rows].reshape(-1)
