"""Finds in a stream of sound where a user starts and stops to speak.

Rules
1. The stream is cut into windows of 32 ms. All decisions are made at the end of a window, so events do not depend on
   the chunks in which the sound arrives.
2. Speech starts with two windows in a row whose probability reaches the threshold. So a click starts no speech.
3. A pause starts with a window whose probability is below the lower threshold, and ends with one that reaches the
   threshold, as in Silero's own code. The two thresholds differ by 0.15.
4. A turn ends in a pause, by the rule of ``end_of_turn``.
5. What is kept of a stream does not grow: a part of a window and, for ``semantic_vad``, the last 8 seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_actors.turns.end_of_turn import Completion, EndOfTurn, FixedSilence
from omni_actors.turns.events import Event, IdleTimeout, SpeechStarted, SpeechStopped
from omni_actors.turns.settings import ServerVad, TurnDetection
from omni_actors.turns.silero import SAMPLE_RATE, WINDOW, SpeechProbability

_WINDOW_MS = WINDOW * 1000 // SAMPLE_RATE
_START_WINDOWS = 2
_DEAF_WINDOWS = 4
"""After speech has ended, the model still finds speech in at most so many windows."""
_HYSTERESIS, _LOWEST = 0.15, 0.01
_DEFAULTS = ServerVad()


def open_detector(settings: TurnDetection) -> Detector:
    """Return a detector for one stream. The first one in a process loads the models, which takes up to a second.

    Raises assets.ModelNotFound (its ``remedy`` is a command): the package of a model is not installed.
    """
    if isinstance(settings, ServerVad):
        return Detector(settings, FixedSilence(settings.silence_duration_ms))
    return Detector(_DEFAULTS, Completion(settings.eagerness))


class Detector:
    """Finds the user's speech in one stream of sound, see ``open_detector``. Use it from one thread at a time."""

    def __init__(self, settings: ServerVad, end_of_turn: EndOfTurn) -> None:
        self._threshold = settings.threshold
        self._pause_threshold = max(settings.threshold - _HYSTERESIS, _LOWEST)
        self._padding_ms, self._idle_ms = settings.prefix_padding_ms, settings.idle_timeout_ms
        self._end_of_turn = end_of_turn
        self._probability = SpeechProbability()
        self._rest = np.empty(0, np.float32)
        self._windows = 0
        self._earliest_ms = 0
        """Where the sound of the next turn may begin: at the end of the turn before."""
        self._first: int | None = None
        """The first window of the speech, or of what may become speech."""
        self._speaking = False
        self._pause: int | None = None
        """The first window of the pause."""
        self._deaf_until = 0
        """How many windows of the stream cannot start speech: the last ones belong to speech that was forgotten."""
        self._idle_from_ms: int | None = None

    @property
    def position_ms(self) -> int:
        """How far the stream has been judged, in milliseconds: at most 32 ms less than was fed."""
        return self._windows * _WINDOW_MS

    @property
    def is_speaking(self) -> bool:
        """Whether speech has started and not stopped."""
        return self._speaking

    @property
    def spoken_until_ms(self) -> int:
        """How far the speech in progress goes: ``position_ms``, or where the pause began that may be its end."""
        return self.position_ms if self._pause is None else self._pause * _WINDOW_MS

    @property
    def waits_from_ms(self) -> int | None:
        """Where the wait begins that ``idle_timeout_ms`` ends, see ``expect_speech``; None: nothing is waited for."""
        return None if self._idle_ms is None else self._idle_from_ms

    def feed(self, samples: np.ndarray[Any, np.dtype[np.float32]]) -> list[Event]:
        """Take the next sound of the stream, and return what was found in it.

        A second of sound costs 3 ms of one core. With ``semantic_vad``, some pauses cost another 40 ms: call this in a
        thread where that is too long for the caller's loop.

        Args:
            samples: float32 (n,), 16 kHz, any n. Values beyond [-1, 1] are clipped.

        Raises:
            ValueError: The array has another shape or type, or a value is not finite. Nothing was taken.
        """
        if samples.ndim != 1 or samples.dtype != np.float32:
            raise ValueError(f"expected float32 (n,), found {samples.dtype} {samples.shape}")
        if not np.isfinite(samples).all():
            raise ValueError("some samples are not finite")
        sound = np.concatenate([self._rest, samples.clip(-1, 1)])
        whole = len(sound) - len(sound) % WINDOW
        self._rest = sound[whole:].copy()
        return [event for window in sound[:whole].reshape(-1, WINDOW) for event in self._judge(window)]

    def expect_speech(self, after_ms: int = 0) -> None:
        """Start to wait for speech: ``IdleTimeout`` follows if none starts for ``idle_timeout_ms``. It happens once.

        Without an ``idle_timeout_ms`` nothing happens. A start of speech, ``reset`` and a later call end the wait.

        Args:
            after_ms: Where in the stream the wait begins: when the answer has been played. The past counts as now.
        """
        self._idle_from_ms = max(after_ms, self.position_ms)

    def reset(self) -> None:
        """Forget the speech in progress, without an event: its sound was taken or discarded. The position goes on.

        If the user goes on speaking, that is new speech.
        """
        if self._speaking:
            self._deaf_until = self._windows + _DEAF_WINDOWS
        self._end_turn()

    def _end_turn(self) -> None:
        self._speaking, self._first, self._pause, self._idle_from_ms = False, None, None, None
        self._earliest_ms = self.position_ms

    def _judge(self, window: np.ndarray[Any, np.dtype[np.float32]]) -> list[Event]:
        self._end_of_turn.add(window)
        probability = self._probability.of(window)
        self._windows += 1
        found = self._in_speech(probability) if self._speaking else self._in_silence(probability)
        return [] if found is None else [found]

    def _in_silence(self, probability: float) -> Event | None:
        if probability < self._threshold or self._windows <= self._deaf_until:
            self._first = None
            return self._idle_timeout()
        if self._first is None:
            self._first = self._windows - 1
        if self._windows - self._first < _START_WINDOWS:
            return None
        self._speaking, self._pause, self._idle_from_ms = True, None, None
        speech_ms = self._first * _WINDOW_MS
        return SpeechStarted(max(speech_ms - self._padding_ms, self._earliest_ms), speech_ms)

    def _in_speech(self, probability: float) -> Event | None:
        assert self._first is not None
        if probability >= self._threshold:
            self._pause = None
        elif self._pause is None and probability < self._pause_threshold:
            self._pause = self._windows - 1
        if self._pause is None:
            return None
        if not self._end_of_turn.has_ended(self._windows - self._first, self._windows - self._pause):
            return None
        stopped = SpeechStopped(self.position_ms, self._pause * _WINDOW_MS)
        self._end_turn()
        return stopped

    def _idle_timeout(self) -> IdleTimeout | None:
        start_ms = self._idle_from_ms
        if self._idle_ms is None or start_ms is None or self.position_ms < start_ms + self._idle_ms:
            return None
        self._idle_from_ms = None
        return IdleTimeout(start_ms, self.position_ms)
