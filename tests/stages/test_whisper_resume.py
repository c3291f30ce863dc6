"""The whisper engine goes on behind its journal, and decodes no window twice whose outputs the journal has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from omni_actors.stages.base import Decisions
from tests.support.long_recording import RATE, WINDOWS, long_recording

pytestmark = pytest.mark.voice

Chunks = list[tuple[dict[str, Any], np.ndarray[Any, Any]]]


def recordings(*sounds: np.ndarray[Any, Any], pieces: int = 1) -> Chunks:
    """Return the input of a request: each recording in so many pieces."""
    return [
        ({"sample_rate": RATE, "index": index}, piece)
        for index, sound in enumerate(sounds)
        for piece in np.array_split(sound, pieces)
    ]


def silence(seconds: float) -> np.ndarray[Any, Any]:
    return np.zeros(int(seconds * RATE), np.float32)


INPUTS: dict[str, Callable[[], Chunks]] = {
    "whole": lambda: recordings(long_recording()),
    "in pieces": lambda: recordings(long_recording(), pieces=60),
    "several": lambda: recordings(long_recording()[: 30 * RATE], silence(1), long_recording()[: 9 * RATE], silence(1)),
}


class Counted:
    """Drives the engine, and counts the windows that it decodes. Decoding the same window again costs nothing."""

    def __init__(self, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._driver, model = driver, driver.engine._model
        self.windows = 0
        self.without_text = 0
        """The number of a window that has no segments, from 1; 0: none."""
        decode, known = model.decode, dict[Any, Any]()

        def decode_once(features: np.ndarray[Any, Any], **options: Any) -> Any:
            self.windows += 1
            key = features.tobytes(), tuple(sorted(options.items()))
            if key not in known:
                segments, advance, language = decode(features, **options)
                known[key] = ([] if len(known) + 1 == self.without_text else segments, advance, language)
            return known[key]

        monkeypatch.setattr(model, "decode", decode_once)

    def transcribe(self, chunks: Chunks, **asked: Any) -> Iterator[tuple[Any, int]]:
        """Yield each output, and how many windows were decoded before it was put out. asked: as ``Driver.start``."""
        self.windows = 0
        self._driver.start(1, **asked)
        for number in range(len(chunks) + 1):
            while self._driver.engine.busy:
                yield from ((output, self.windows) for output in self._driver.step())
            if number < len(chunks):
                data, sound = chunks[number]
                self._driver.feed(1, data, {"audio": sound})
            else:
                self._driver.feed(1, last=True)
        while self._driver.engine.busy:
            yield from ((output, self.windows) for output in self._driver.step())


@pytest.fixture
def counted(drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(drive("whisper"), monkeypatch)


def contents(outputs: list[Any]) -> list[tuple[dict[str, Any], Decisions, bool]]:
    return [(output.data, output.decisions, output.last) for output in outputs]


@pytest.mark.parametrize("timestamps", [None, pytest.param("word", marks=pytest.mark.slow)])
@pytest.mark.parametrize("made", [pytest.param("whole", marks=pytest.mark.slow), "in pieces", "several"])
def test_no_window_is_decoded_again_whose_output_is_in_the_journal(
    counted: Counted, made: str, timestamps: str | None
) -> None:
    chunks, asked = INPUTS[made](), {"timestamps": timestamps, "initial_prompt": "A lesson."}
    expected = list(counted.transcribe(chunks, **asked))
    outputs, windows = [output for output, _ in expected], counted.windows
    assert len({count for _, count in expected}) >= 3, "there are several windows"
    for size in range(1, len(outputs) + 1):
        journal = tuple(output.decisions for output in outputs[:size])
        assert all(type(number) is int for entry in journal for number in entry)
        for needed_from in {0, size}:
            resumed = counted.transcribe(chunks, **asked, journal=journal, needed_from=needed_from)
            again = [output for output, _ in resumed]
            assert contents(again) == contents(outputs), f"after output {size}"
            assert counted.windows == windows - expected[size - 1][1]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(WINDOWS) + 1))
def test_a_window_without_text_is_decoded_again_if_no_output_follows(counted: Counted, number: int) -> None:
    counted.without_text = number
    chunks = INPUTS["in pieces"]()
    expected = list(counted.transcribe(chunks))
    outputs, windows = [output for output, _ in expected], counted.windows
    for size in range(1, len(outputs) + 1):
        journal = tuple(output.decisions for output in outputs[:size])
        assert contents([output for output, _ in counted.transcribe(chunks, journal=journal)]) == contents(outputs)
        assert counted.windows == windows - expected[size - 1][1]


def test_the_outputs_of_the_journal_wait_for_no_sound(counted: Counted) -> None:
    chunks = INPUTS["in pieces"]()
    outputs = [output for output, _ in counted.transcribe(chunks)]
    journal = tuple(output.decisions for output in outputs[:2])
    resumed = counted.transcribe(chunks, journal=journal)
    put_out = [next(resumed) for _ in WINDOWS[0]]
    assert put_out == [(output, 0) for output in outputs[: len(WINDOWS[0])]]
    assert len(list(resumed)) == len(outputs) - len(WINDOWS[0])
    assert all(len(output.decisions) < 40 for output in outputs), "a journal is about as long as its text"
