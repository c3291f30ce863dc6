from __future__ import annotations

import difflib
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_actors.stages import assets
from omni_actors.stages.base import InvalidRequest
from ringbuf import Tensor

pytestmark = pytest.mark.voice

PARIS = "The capital of France is Paris."
SHIPS = "Seven ships came home."
Speak = Callable[[str], np.ndarray[Any, Any]]


@pytest.fixture
def driver(drive: Callable[..., Any]) -> Any:
    return drive("whisper")


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def transcript(outputs: list[Any], index: int = 0) -> list[str]:
    return words("".join(output.data["text"] for output in outputs if output.data["index"] == index))


def at(rate: int, index: int = 0) -> dict[str, Any]:
    return {"sample_rate": rate, "index": index}


@pytest.mark.parametrize("rate", [*(pytest.param(rate, marks=pytest.mark.slow) for rate in (8000, 16000)), 44100])
def test_speech_at_any_sample_rate_is_transcribed(driver: Any, speak: Speak, rate: int) -> None:
    """The tests below use 24 kHz."""
    import soxr

    audio = soxr.resample(speak(PARIS), 24000, rate)
    driver.start(1)
    driver.feed(1, at(rate), {"audio": audio}, last=True)
    outputs = driver.run()[1]
    assert transcript(outputs) == words(PARIS)
    assert not outputs[0].data["text"].startswith(" ")
    assert outputs[-1].data == {"text": "", "index": 0, "duration_s": pytest.approx(len(audio) / rate)}


def test_recordings_are_distinguished_by_their_index(driver: Any, speak: Speak) -> None:
    paris, ships = speak(PARIS), speak(SHIPS)
    driver.start(1)
    for piece in np.array_split(paris, 4):
        driver.feed(1, at(24000, 0), {"audio": piece})
    driver.feed(1, at(24000, 1), {"audio": ships})
    driver.feed(1, last=True)
    outputs = driver.run()[1]
    assert transcript(outputs, 0) == words(PARIS)
    assert transcript(outputs, 1) == words(SHIPS)
    assert outputs[-1].data["duration_s"] == pytest.approx((len(paris) + len(ships)) / 24000)


def test_a_recording_is_transcribed_before_the_next_one_is_complete(driver: Any, speak: Speak) -> None:
    driver.start(1)
    driver.feed(1, at(24000, 0), {"audio": speak(PARIS)})
    assert not driver.engine.busy
    driver.feed(1, at(24000, 1), {"audio": speak(SHIPS)})
    outputs = driver.run()[1]
    assert transcript(outputs) == words(PARIS)
    assert not outputs[-1].last
    driver.abort(1)


@pytest.mark.slow
def test_a_long_recording_does_not_delay_a_short_one(driver: Any, speak: Speak) -> None:
    long = np.concatenate([speak(PARIS), speak(SHIPS)] * 8)
    assert 30 < len(long) / 24000 < 60
    for request_id, audio in ((1, long), (2, speak(SHIPS))):
        driver.start(request_id)
        driver.feed(request_id, at(24000), {"audio": audio}, last=True)
    outputs = []
    while driver.engine.busy:
        outputs += driver.step()
    last = [output for output in outputs if output.last]
    assert [output.request_id for output in last] == [2, 1]
    assert last[1].data["duration_s"] == pytest.approx(len(long) / 24000, abs=0.01)


@pytest.mark.slow
def test_a_long_recording_is_transcribed_while_it_arrives(driver: Any, speak: Speak) -> None:
    long = np.concatenate([speak(PARIS), speak(SHIPS)] * 8)
    # Digital silence is more sensitive to the loudest sound, which is not known yet, than any recording is.
    long += 1e-3 * np.random.default_rng(0).standard_normal(len(long)).astype(np.float32)
    driver.start(1)
    driver.feed(1, at(24000), {"audio": long}, last=True)
    whole = "".join(output.data["text"] for output in driver.run()[1])
    driver.start(2)
    outputs = []
    for piece in np.array_split(long, 50):
        driver.feed(2, at(24000), {"audio": piece})
        outputs += driver.run().get(2, [])
    assert len(outputs) > 1
    driver.feed(2, last=True)
    outputs += driver.run()[2]
    # Rounding may move the end of a window, so that some words come twice, and turn "Seven" into "7", in either text.
    texts = whole, "".join(output.data["text"] for output in outputs)
    ratio = difflib.SequenceMatcher(None, *(text.split() for text in texts)).ratio()
    assert ratio > 0.8, texts  # without half of the text it would be 0.67
    assert outputs[-1].data["duration_s"] == pytest.approx(len(long) / 24000, abs=0.01)


def test_silence_gives_no_words(driver: Any) -> None:
    driver.start(1)
    driver.feed(1, at(16000), {"audio": np.zeros(16000, np.float32)}, last=True)
    [output] = driver.run()[1]
    assert output.last
    assert output.data["duration_s"] == 1.0


SECOND = np.zeros(16000, np.float32)


@pytest.mark.parametrize(
    ("data", "tensors", "reason"),
    [
        ({}, {}, "no audio"),
        (at(16000), {"audio": SECOND[:0]}, "too short"),
        (at(16000), {"audio": SECOND[:1599]}, "too short"),
        (at(16000), {"audio": np.where(np.arange(16000) == 9, np.nan, SECOND).astype(np.float32)}, "not finite"),
        (at(16000), {"audio": SECOND.astype(np.int16)}, "float32"),
        (at(16000), {"audio": SECOND.reshape(2, -1)}, "mono"),
        (at(16000), {"audio": Tensor("bfloat16", (4,), bytes(8))}, "float32"),
        ({"index": 0}, {"audio": SECOND}, "sample rate"),
        (at(0), {"audio": SECOND}, "sample rate"),
        (at(16000, -1), {"audio": SECOND}, "recording -1"),
    ],
)
def test_invalid_audio_is_refused(driver: Any, data: Any, tensors: Any, reason: str) -> None:
    driver.start(1)
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        driver.feed(1, data, tensors, last=True)
    assert refusal.value.param == "audio"
    driver.abort(1)


def test_a_short_recording_is_refused_when_the_next_one_begins(driver: Any) -> None:
    driver.start(1)
    driver.feed(1, at(16000, 0), {"audio": SECOND[:9]})
    with pytest.raises(InvalidRequest, match="recording 0 is too short"):
        driver.feed(1, at(16000, 1), {"audio": SECOND})
    driver.abort(1)


@pytest.mark.parametrize(("again", "reason"), [(at(16000, 0), "came after"), (at(8000, 1), "changes its sample rate")])
def test_pieces_that_do_not_fit_together_are_refused(driver: Any, again: dict[str, Any], reason: str) -> None:
    driver.start(1)
    driver.feed(1, at(16000, 1), {"audio": SECOND})
    with pytest.raises(InvalidRequest, match=reason):
        driver.feed(1, again, {"audio": SECOND})
    driver.abort(1)


def test_a_language_that_the_model_lacks_is_refused(driver: Any) -> None:
    with pytest.raises(InvalidRequest, match="'fr'") as refusal:
        driver.start(1, language="fr")
    assert refusal.value.param == "language"
    driver.start(1, language="en")
    driver.abort(1)


def test_the_engine_opens_without_a_network(open_stage: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("reached for the network"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("looked up a host"))
    open_stage("whisper").close()


def test_a_model_without_its_tokenizer_is_refused(open_stage: Callable[..., Any], tmp_path: Path) -> None:
    shutil.copy(assets.resolve("whisper-tiny.en") / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        open_stage("whisper", tmp_path)


def test_times_of_segments_and_words_lie_in_the_recording_and_do_not_change_the_text(driver: Any, speak: Speak) -> None:
    """The recording is longer than a window."""
    gap = np.zeros(24000 * 16, np.float32)
    audio = np.concatenate([speak(PARIS), gap, speak(SHIPS), gap, speak(PARIS)])
    texts = []
    for number, timestamps in enumerate([None, "segment", "word"], 1):
        driver.start(number, timestamps=timestamps)
        driver.feed(number, at(24000), {"audio": audio}, last=True)
        outputs = driver.run()[number]
        texts.append(transcript(outputs))
        assert msgspec.msgpack.encode([output.data for output in outputs]), "all values are Python's own"
        assert ("language" in outputs[-1].data) == (timestamps is not None)
        segments = [output.data["segment"] for output in outputs[:-1] if timestamps]
        assert all("words" in segment for segment in segments) == (timestamps != "segment")
    assert texts[0] == texts[1] == texts[2]
    spoken = [word for segment in segments for word in segment["words"]]
    assert [words(word["word"]) for word in spoken] == [[word] for word in texts[0]]
    times = [time for word in spoken for time in (word["start"], word["end"])]
    assert times == sorted(times)
    assert times[-1] <= len(audio) / 24000
    ships = next(word for word in spoken if words(word["word"]) == ["ships"])
    assert ships["start"] == pytest.approx((len(speak(PARIS)) + len(gap)) / 24000, abs=1.5)


def test_a_model_of_one_language_refuses_to_translate(driver: Any) -> None:
    with pytest.raises(InvalidRequest, match="knows English only") as caught:
        driver.start(1, task="translate")
    assert caught.value.param == "task"


def test_a_prompt_before_the_recording_is_accepted(driver: Any, speak: Speak) -> None:
    driver.start(1, initial_prompt="A lesson about cities.")
    driver.feed(1, at(24000), {"audio": speak(PARIS)}, last=True)
    assert transcript(driver.run()[1]) == words(PARIS)
