"""The windows of a recording that arrives in pieces, without a model that decodes them."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from omni_actors.stages.multimodal.audio import Recording
from tests.support.closeness import assert_close

pytestmark = pytest.mark.voice


class Model:
    """Computes features as faster-whisper does, and "decodes" windows that begin ``advances`` frames apart."""

    def __init__(self, advances: Sequence[int]) -> None:
        from omni_actors.stages.whisper.windows import _Extractor

        self.feature_extractor = _Extractor()
        self.windows: list[np.ndarray[Any, Any]] = []
        self.options: list[dict[str, Any]] = []
        self._advances = itertools.cycle(advances)

    def decode(self, features: np.ndarray[Any, Any], **options: Any) -> tuple[list[str], int, str]:
        self.windows.append(features)
        self.options.append(options)
        return ["one", "two"], min(next(self._advances), features.shape[1] - 1), "de"


def transcribe(pieces: Sequence[np.ndarray[Any, Any]], rate: int, advances: Sequence[int]) -> tuple[Any, int]:
    """Return the features of the windows, and how many windows were there before the recording was complete."""
    from omni_actors.stages.whisper.windows import Transcription

    model: Any = Model(advances)
    transcription = Transcription(model, 0, {"language": None})
    recording = Recording(0, rate, [])
    for piece in pieces:
        recording.pieces.append(piece)
        transcription.take(recording)
        while transcription.ready:
            transcription.next_window()
        assert sum(map(len, transcription._pieces)) < 16000 * 32
    early = len(model.windows)
    transcription.complete(recording)
    assert len(list(iter(transcription.next_window, None))) == len(model.windows) - early > 0
    return model.windows, early


@pytest.mark.parametrize("rate", [16000, 24000])
@pytest.mark.parametrize("advances", [(2870, 3000, 2412), (3000,), (1,) * 3 + (2999,)], ids=str)
def test_the_windows_of_pieces_are_those_of_the_whole(rate: int, advances: Sequence[int]) -> None:
    sound = np.random.default_rng(0).standard_normal(rate * 70 + 123).astype(np.float32) * 0.1
    whole, none_early = transcribe([sound], rate, advances)
    assert none_early == 0
    windows, early = transcribe(np.array_split(sound, 300), rate, advances)
    assert early >= 2
    assert len(windows) == len(whole)
    for found, expected in zip(windows, whole, strict=True):
        assert_close(found, expected)


def test_windows_do_not_depend_on_when_pieces_arrive() -> None:
    sound = np.random.default_rng(0).standard_normal(16000 * 65).astype(np.float32) * np.linspace(0, 1, 16000 * 65)
    pieces = np.array_split(sound.astype(np.float32), 40)
    stepwise, _ = transcribe(pieces, 16000, (2870,))

    from omni_actors.stages.whisper.windows import Transcription

    model: Any = Model((2870,))
    transcription, recording = Transcription(model, 0, {"language": None}), Recording(0, 16000, pieces)
    transcription.complete(recording)
    while transcription.next_window() is not None:
        pass
    for found, expected in zip(model.windows, stepwise, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("pieces", [1, 40])
def test_a_transcription_that_begins_at_a_place_has_the_windows_behind_it(pieces: int) -> None:
    """With their language, without the prompt, and with the floor of the features that the sound before them sets."""
    from omni_actors.stages.whisper.windows import Transcription

    fading = np.random.default_rng(0).standard_normal(16000 * 95) * np.linspace(1, 1e-6, 16000 * 95)
    sound, options = fading.astype(np.float32), {"language": None, "initial_prompt": "Words.", "task": "translate"}
    model: Any = Model((2870,))
    whole = Transcription(model, 0, dict(options))
    whole.complete(Recording(0, 16000, np.array_split(sound, pieces)))
    places = []
    while whole.next_window() is not None:
        places.append(whole.place)
    assert len(places) >= 4
    for number, place in enumerate(places, 1):
        again: Any = Model((2870,))
        later, recording = Transcription(again, 0, dict(options), place), Recording(0, 16000, [])
        for piece in np.array_split(sound, pieces):
            recording.pieces.append(piece)
            later.take(recording)
            assert sum(map(len, later._pieces)) < 16000 * 32
            while later.ready:
                later.next_window()
        later.complete(recording)
        while later.next_window() is not None:
            pass
        assert later.place == places[-1]
        assert again.options == model.options[number:]
        assert len(again.windows) == len(model.windows) - number
        for found, expected in zip(again.windows, model.windows[number:], strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_window_takes_no_copy_of_the_sound_that_waits_behind_it() -> None:
    from omni_actors.stages.whisper.windows import Transcription

    seconds = 3600
    model: Any = Model([3000])
    transcription = Transcription(model, 0, {"language": None})
    transcription.take(Recording(0, 16000, [np.zeros(16000, np.float32)] * seconds))
    tracemalloc.start()
    try:
        transcription.next_window()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 16000 * seconds / 2


def test_a_recording_begins_with_its_second_piece() -> None:
    from omni_actors.stages.whisper.windows import Transcription

    model: Any = Model((3000,))
    transcription = Transcription(model, 0, {"language": None})
    minute = np.zeros(16000 * 60, np.float32)
    transcription.take(Recording(0, 16000, [minute]))
    assert not transcription.ready  # it may be the whole recording
    transcription.take(Recording(0, 16000, [minute[:160]]))
    assert transcription.ready
