"""The detectors hear hibari's voice, alone and in noise. Times are positions in the stream."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.turns import (
    END_MS,
    FORMATS,
    NOISE_DB,
    PAUSE_S,
    RATE,
    SENTENCES,
    SETTINGS,
    START_MS,
    UNFINISHED,
    Conversation,
    converse,
    listen,
    say,
)
from omni_actors import turns
from omni_actors.stress.report import percentile
from omni_actors.turns import completion
from omni_actors.turns.end_of_turn import Completion

pytestmark = pytest.mark.voice

SERVER, SEMANTIC = turns.ServerVad(), turns.SemanticVad()
SILENCE = np.zeros(RATE, np.float32)


@pytest.fixture(scope="module")
def conversations() -> dict[int | None, Conversation]:
    """The fixed set of sentences, by the noise in them."""
    spoken = [say(text) for text in SENTENCES]
    return {noise_db: converse(spoken, noise_db) for noise_db in NOISE_DB}


def shifted(sound: np.ndarray, seconds: float) -> np.ndarray:
    return np.concatenate([np.zeros(int(seconds * RATE), np.float32), sound])


def events(detection: turns.TurnDetection, sound: np.ndarray, sizes: list[int] | None = None) -> list[turns.Event]:
    """Feed a sound to a new detector, in chunks of these sizes over and over; whole without them."""
    detector = turns.open_detector(detection)
    found, at = [], 0
    for size in itertools.cycle(sizes or [len(sound)]):
        if at >= len(sound):
            return found
        found += detector.feed(sound[at : at + size])
        at += size
    raise AssertionError


@pytest.mark.parametrize(
    ("kind", "noises"),
    [
        ("server_vad", NOISE_DB),
        pytest.param("semantic_vad", NOISE_DB, marks=pytest.mark.slow),
    ],
)
def test_each_sentence_is_one_turn_that_is_found_in_time(
    kind: str, noises: tuple[int | None, ...], conversations: dict[int | None, Conversation]
) -> None:
    found = [listen(SETTINGS[kind], conversations[noise_db]) for noise_db in noises]
    assert [each.wrong for each in found] == [0] * len(noises)
    starts, ends = ([delay for each in found for delay in each[n]] for n in (0, 1))
    assert len(ends) == len(SENTENCES) * len(noises)
    assert (percentile(starts, 95) or 0) <= START_MS
    assert (percentile(ends, 95) or 0) <= END_MS[kind]


@pytest.mark.parametrize(
    ("format", "noises"),
    [
        ("audio/pcmu", (None,)),
        pytest.param("audio/pcm", NOISE_DB, marks=pytest.mark.slow),
        pytest.param("audio/pcmu", NOISE_DB, marks=pytest.mark.slow),
    ],
)
def test_turns_are_found_in_time_in_the_formats_of_clients(
    format: str, noises: tuple[int | None, ...], conversations: dict[int | None, Conversation]
) -> None:
    """A session resamples the sound, which must not delay what is found beyond the bounds."""
    found = [listen(SEMANTIC, conversations[noise_db], FORMATS[format]) for noise_db in noises]
    assert [each.wrong for each in found] == [0] * len(noises)
    starts, ends = ([delay for each in found for delay in each[n]] for n in (0, 1))
    assert (percentile(starts, 95) or 0) <= START_MS
    assert (percentile(ends, 95) or 0) <= END_MS["semantic_vad"]


@pytest.mark.parametrize("detection", [SERVER, SEMANTIC], ids=SETTINGS)
@settings(max_examples=8)
@given(sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) >= 200))
def test_events_do_not_depend_on_the_chunks(detection: turns.TurnDetection, sizes: list[int]) -> None:
    sound = converse([say(SENTENCES[0])], 20).sound
    assert events(detection, sound, sizes) == events(detection, sound)
    assert len(events(detection, sound)) == 2


def test_a_turn_begins_with_the_padding_and_ends_with_the_silence() -> None:
    sound = converse([say(SENTENCES[0])], None)
    [(begin, end)] = sound.spoken_ms
    started, stopped = events(turns.ServerVad(prefix_padding_ms=200, silence_duration_ms=800), sound.sound)
    assert isinstance(started, turns.SpeechStarted)
    assert isinstance(stopped, turns.SpeechStopped)
    assert started.at_ms == started.speech_ms - 200
    assert begin - 32 <= started.speech_ms <= begin + START_MS
    assert abs(stopped.speech_ms - end) <= 100
    assert 800 - 32 <= stopped.at_ms - stopped.speech_ms <= 800


def test_the_padding_begins_neither_before_the_stream_nor_in_the_turn_before() -> None:
    detection = turns.ServerVad(prefix_padding_ms=10_000, silence_duration_ms=200)
    speech = say(SENTENCES[0])
    found = events(detection, np.concatenate([speech, SILENCE, speech, SILENCE]))
    assert [type(event).__name__ for event in found] == ["SpeechStarted", "SpeechStopped"] * 2
    assert found[0].at_ms == 0
    assert found[2].at_ms == found[1].at_ms


def test_a_higher_threshold_needs_clearer_speech() -> None:
    sound = converse([say(SENTENCES[0])], None).sound
    assert events(turns.ServerVad(threshold=1), sound) == []
    early, late = (events(turns.ServerVad(threshold=threshold), sound)[0] for threshold in (0.1, 0.9))
    assert isinstance(early, turns.SpeechStarted)
    assert isinstance(late, turns.SpeechStarted)
    assert early.speech_ms <= late.speech_ms


@pytest.mark.parametrize("text", UNFINISHED)
def test_semantic_detection_waits_for_the_rest_of_a_sentence(text: str) -> None:
    """A fixed silence of 500 ms would have cut it."""
    sound = converse([say(text)], None)
    [(_, end)] = sound.spoken_ms
    assert listen(SERVER, sound).wrong == 0
    assert PAUSE_S == 2
    ends = [event for event in events(SEMANTIC, sound.sound) if isinstance(event, turns.SpeechStopped)]
    assert not ends or ends[0].at_ms >= end + 1000


def test_eagerness_sets_the_longest_pause() -> None:
    sound = np.concatenate([shifted(say(UNFINISHED[0]), 1), *[SILENCE] * 10])
    waits = {}
    for eagerness in ("high", "auto", "medium", "low"):
        _, stopped = events(turns.SemanticVad(eagerness=eagerness), sound)
        assert isinstance(stopped, turns.SpeechStopped)
        waits[eagerness] = stopped.at_ms - stopped.speech_ms
    assert waits["high"] <= 2016
    assert waits["high"] <= waits["auto"] == waits["medium"] <= 4000
    assert waits["medium"] <= waits["low"] <= 8000


@pytest.mark.parametrize("detection", [SERVER, SEMANTIC], ids=SETTINGS)
def test_what_is_not_speech_starts_no_turn(detection: turns.TurnDetection) -> None:
    rng = np.random.default_rng(0)
    clicks = np.zeros(5 * RATE, np.float32)
    clicks[::RATE] = 1
    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(5 * RATE) / RATE)
    for level in (0.001, 0.01, 0.1, 0.5):
        assert events(detection, (level * rng.standard_normal(5 * RATE)).astype(np.float32)) == []
    assert events(detection, clicks) == []
    assert events(detection, tone.astype(np.float32)) == []


def test_clipped_speech_is_heard_as_other_speech() -> None:
    loud = 20 * converse([say(SENTENCES[0])], None).sound
    assert np.abs(loud).max() > 1
    found = events(SERVER, loud)
    assert found == events(SERVER, loud.clip(-1, 1))
    assert [type(event) for event in found] == [turns.SpeechStarted, turns.SpeechStopped]


@pytest.mark.parametrize(
    "samples",
    [
        np.array([0, np.nan], np.float32),
        np.array([np.inf], np.float32),
        np.zeros(4, np.float64),
        np.zeros((2, 2), np.float32),
    ],
    ids=["nan", "infinite", "float64", "two dimensions"],
)
def test_wrong_samples_are_refused_and_change_nothing(samples: np.ndarray) -> None:
    sound = converse([say(SENTENCES[0])], None).sound
    detector = turns.open_detector(SERVER)
    found = detector.feed(sound[:40_001])
    with pytest.raises(ValueError, match=r"not finite|expected float32"):
        detector.feed(samples)
    assert found + detector.feed(sound[40_001:]) == events(SERVER, sound)


@pytest.mark.parametrize("seconds", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_minutes_of_silence_take_no_more_memory_than_ten_seconds(seconds: int) -> None:
    detector = turns.open_detector(SEMANTIC)
    for _ in range(10):
        detector.feed(SILENCE)
    tracemalloc.start()
    try:
        assert not any(detector.feed(SILENCE) for _ in range(10, seconds))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000
    assert detector.position_ms == seconds * 1000


def test_a_user_who_says_nothing_is_timed_out_once() -> None:
    detector = turns.open_detector(turns.ServerVad(idle_timeout_ms=5000))
    assert [event for _ in range(8) for event in detector.feed(SILENCE)] == []
    detector.expect_speech(after_ms=9000)
    found = [event for _ in range(20) for event in detector.feed(SILENCE)]
    assert found == [turns.IdleTimeout(9000, 14016)]


def test_speech_and_reset_end_the_wait_for_speech() -> None:
    detector = turns.open_detector(turns.ServerVad(idle_timeout_ms=5000))
    detector.expect_speech()
    found = [*detector.feed(shifted(say(SENTENCES[0]), 1)), *(e for _ in range(8) for e in detector.feed(SILENCE))]
    assert [type(event) for event in found] == [turns.SpeechStarted, turns.SpeechStopped]
    detector.expect_speech()
    detector.reset()
    assert [event for _ in range(8) for event in detector.feed(SILENCE)] == []


def test_reset_forgets_the_speech_in_progress() -> None:
    detector = turns.open_detector(SERVER)
    assert detector.feed(say(SENTENCES[0]))
    assert detector.is_speaking
    position = detector.position_ms
    detector.reset()
    assert not detector.is_speaking
    assert detector.feed(np.zeros(2 * RATE, np.float32)) == []
    assert detector.position_ms > position


def test_the_model_is_asked_before_a_pause_can_end_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its answer is there in time. A pause that ends before has no effect on the next one."""
    asked = []

    def answer(turn: np.ndarray) -> float:
        asked.append(len(turn))
        return answers.pop(0)

    monkeypatch.setattr(completion, "completion_probability", answer)
    rule, answers = Completion("auto"), [1.0, 0.0, 1.0]
    assert [rule.has_ended(20, pause) for pause in range(1, 9)] == [False] * 8
    assert len(asked) == 1, "at the sixth window"
    ends = [rule.has_ended(40, pause) for pause in range(1, 19)]
    assert (ends, len(asked)) == ([False] * 17 + [True], 3), "at the sixth and the eighteenth window"


def test_a_stream_full_of_pauses_asks_the_model_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ask = completion.completion_probability

    def counted(turn: np.ndarray) -> float:
        asked.append(len(turn))
        return ask(turn)

    monkeypatch.setattr(completion, "completion_probability", counted)
    rule = Completion("auto")
    windows = 1000
    for count in range(windows):
        rule.add(np.zeros(512, np.float32))
        rule.has_ended(count + 1, count % 20 + 1)
    assert 8 < len(asked) <= 8 + windows / 85
    assert max(asked) == 128_000
