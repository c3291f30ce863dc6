"""The text that was heard is the prefix of an answer that its sound had reached."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.turns import SpokenAnswer
from omni_actors.turns.heard import _find

RATE = 24_000


def loud(seconds: float) -> np.ndarray:
    return np.full(round(seconds * RATE), 0.1, np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)


def test_a_word_is_heard_when_half_of_it_was_played() -> None:
    answer = SpokenAnswer()
    answer.add_text("one two six ten")  # each takes a quarter of the sound
    answer.add_sound(loud(4), RATE)
    answer.finish()
    heard = [answer.heard(ms) for ms in (0, 400, 600, 1400, 1600, 3400, 3600, 4000, 9000)]
    assert heard == ["", "", "one", "one", "one two", "one two six", *["one two six ten"] * 3]


def test_silence_carries_no_words() -> None:
    answer = SpokenAnswer()
    answer.add_text("one two")
    answer.add_sound(np.concatenate([silence(1), loud(1), silence(3), loud(1), silence(1)]), RATE)
    answer.finish()
    assert [answer.heard(ms) for ms in (900, 1600, 4900, 5400, 5600)] == ["", "one", "one", "one", "one two"]


def test_the_chunks_in_which_sound_arrives_do_not_matter() -> None:
    whole, pieces = SpokenAnswer(), SpokenAnswer()
    sound = np.concatenate([loud(1), silence(0.5), loud(2)])
    whole.add_sound(sound, RATE, "one two six ten")
    for begin in range(0, len(sound), 777):
        pieces.add_sound(sound[begin : begin + 777], RATE, None if begin else "one two six ten")
    for answer in (whole, pieces):
        answer.add_text("one two six ten")
        answer.finish()
    assert [pieces.heard(ms) for ms in range(0, 4000, 50)] == [whole.heard(ms) for ms in range(0, 4000, 50)]


def test_sentences_begin_with_their_sound() -> None:
    """The words of a slow sentence do not move those of the next."""
    answer = SpokenAnswer()
    answer.add_text('Go! "And  then,\n we come - ')
    answer.add_text('back."')
    answer.add_sound(loud(3), RATE, "Go!")
    answer.add_sound(loud(0.5), RATE, '"And then, we come back."')
    answer.add_sound(loud(0.5), RATE)
    answer.finish()
    assert answer.heard(2900) == "Go!"
    assert answer.heard(3500) == 'Go! "And  then,\n we'
    assert answer.heard(4000) == answer.text


def test_a_sentence_that_is_not_spoken_is_heard_with_the_next() -> None:
    answer = SpokenAnswer()
    answer.add_text("Yes. :-) No.")
    answer.add_sound(loud(1), RATE, "Yes.")
    answer.add_sound(loud(1), RATE, "No.")
    answer.finish()
    assert [answer.heard(ms) for ms in (1000, 1400)] == ["Yes."] * 2
    assert answer.heard(1600) == "Yes. :-) No."


def test_a_sentence_is_looked_for_behind_those_before_it() -> None:
    answer = SpokenAnswer()
    answer.add_text("No. No. No. No way.")
    for sentence in ("No.", "No.", "No.", "No way."):
        answer.add_sound(loud(1), RATE, sentence)
    answer.finish()
    heard = [answer.heard(ms) for ms in (900, 1900, 2900, 3400)]
    assert heard == ["No.", "No. No.", "No. No. No.", "No. No. No. No"]


def test_the_length_of_a_sentence_is_known_when_the_next_one_begins() -> None:
    answer = SpokenAnswer()
    answer.add_text("One two six ten. And more.")
    answer.add_sound(loud(0.4), RATE, "One two six ten.")
    assert answer.heard(390) == "One two", "this would be faster than usual, so there may be more sound"
    answer.add_sound(loud(0.1), RATE, "And more.")
    assert answer.heard(390) == "One two six ten."


def test_a_silent_sentence_is_heard_when_it_is_over() -> None:
    answer = SpokenAnswer()
    answer.add_text("Hm. Hm. Go.")
    for sentence, sound in (("Hm.", silence(1)), ("Hm.", silence(1)), ("Go.", loud(1))):
        answer.add_sound(sound, RATE, sentence)
    assert [answer.heard(ms) for ms in (900, 1000, 1900, 2000)] == ["", "Hm.", "Hm.", "Hm. Hm."]


def test_text_that_is_ahead_of_its_sound_was_not_heard() -> None:
    answer = SpokenAnswer()
    answer.add_text("This is a long answer. Nobody has heard its second sentence yet.")
    answer.add_sound(loud(1), RATE)
    heard = answer.heard(1000)
    assert heard == "This is a long answer."  # 24 letters a second
    answer.add_sound(loud(7), RATE)
    answer.finish()
    assert answer.heard(1000) == "This is"


def test_a_sentence_without_its_end_is_as_fast_as_those_before() -> None:
    answer = SpokenAnswer()
    answer.add_text("One two six ten. One two six ten one two six ten.")
    answer.add_sound(loud(4), RATE, "One two six ten.")
    answer.add_sound(loud(2), RATE, "One two six ten one two six ten.")
    assert answer.heard(6000) == "One two six ten. One two six ten"  # 8 letters a second


def test_an_answer_without_sound_was_not_heard() -> None:
    answer = SpokenAnswer()
    answer.add_text("Hello")
    assert answer.heard(10_000) == ""


@given(
    words=st.lists(st.text("ab.,é", min_size=1, max_size=6), min_size=1, max_size=20),
    sound=st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=8),
    times=st.lists(st.floats(0, 3000), min_size=2, max_size=10),
    is_finished=st.booleans(),
)
def test_more_sound_never_means_fewer_words(
    words: list[str], sound: list[tuple[bool, int]], times: list[float], is_finished: bool
) -> None:
    answer = SpokenAnswer()
    answer.add_text(" ".join(words))
    for number, (is_loud, samples) in enumerate(sound):
        part = np.full(samples, 0.1 * is_loud, np.float32)
        answer.add_sound(part, RATE, words[number] if number < len(words) else None)
    if is_finished:
        answer.finish()
    heard = [answer.heard(at) for at in sorted(times)]
    assert all(answer.text.startswith(text) for text in heard)
    assert heard == sorted(heard, key=len)
    assert not is_finished or answer.heard(10**6) == answer.text
    assert not any(text[-1:].isspace() for text in heard), "it ends with a whole word"


@given(
    sentences=st.lists(
        st.tuples(st.text("ab, é", min_size=1, max_size=12), st.lists(st.integers(0, 9000), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    asked=st.lists(st.floats(0, 3000), min_size=1, max_size=8),
    is_finished=st.booleans(),
)
def test_what_was_heard_does_not_depend_on_earlier_questions(
    sentences: list[tuple[str, list[int]]], asked: list[float], is_finished: bool
) -> None:
    often, once = SpokenAnswer(), SpokenAnswer()
    for answer in (often, once):
        answer.add_text(". ".join(text for text, _ in sentences))
        for text, parts in sentences:
            for number, samples in enumerate(parts):
                answer.add_sound(np.full(samples, 0.1, np.float32), RATE, None if number else text)
                if answer is often:
                    for at in asked:
                        answer.heard(at)
        if is_finished:
            answer.finish()
    assert [often.heard(at) for at in asked] == [once.heard(at) for at in asked]


@given(text=st.text("ab,_é1² ", max_size=60), after=st.integers(0, 60), sentence=st.text("ab,_é1² ", max_size=5))
def test_a_sentence_is_where_its_letters_and_digits_are_first(text: str, after: int, sentence: str) -> None:
    letters = [re.escape(character) for character in sentence if character.isalnum()]
    found = re.compile(r"[\W_]*".join(letters)).search(text, after) if letters else None
    assert _find(text, after, sentence) == (None if found is None else found.span())


@pytest.mark.perf
def test_a_long_sentence_that_is_not_in_a_repetitive_text_is_missed_soon() -> None:
    """A search that compares the sentence at each place takes about 0.1 s of CPU time."""
    answer = SpokenAnswer()
    answer.add_text("na " * 13_000)
    answer.add_sound(loud(1), RATE, "na " * 149 + "xy")
    began = time.thread_time()
    assert answer.heard(500) == ""
    assert time.thread_time() - began < 0.05


@pytest.mark.voice
@pytest.mark.slow
def test_whisper_hears_the_same_words_to_one() -> None:
    """Whisper's times of words are themselves off by some 0.1 s, so a twentieth of the positions may differ by more."""
    import soxr
    from faster_whisper import WhisperModel
    from hibari import Hibari

    from omni_actors.stages import assets

    voice = Hibari(threads=1)
    whisper = WhisperModel(str(assets.resolve("whisper-tiny.en")), device="cpu", compute_type="float32", cpu_threads=1)
    texts = (
        "To make tea, boil some water. Put the leaves into a pot, pour the water over them, and wait for four minutes.",
        "When I was a child, we lived near a small beach, and every morning we walked there with our dog.",
        "Please open the door. Then turn left, go straight on for a while, and you will see the station on the right.",
    )
    differences: list[int] = []
    early: list[int] = []
    for text in texts:
        answer, parts, ends = SpokenAnswer(), [], []
        answer.add_text(text)
        for sentence in voice.split_sentences(text):
            sound = voice(sentence, seed=0).astype(np.float32)
            answer.add_sound(sound, RATE, sentence)
            begins_s = sum(map(len, parts)) / RATE
            segments, _ = whisper.transcribe(soxr.resample(sound, RATE, 16_000), word_timestamps=True)
            words = [word for segment in segments for word in segment.words]
            assert len(words) == len(sentence.split())
            ends += [begins_s + (word.start + word.end) / 2 for word in words]
            parts.append(sound)
        answer.finish()
        for at_ms in range(0, sum(map(len, parts)) * 1000 // RATE, 100):
            expected = sum(1000 * end <= at_ms for end in ends)
            differences.append(abs(len(answer.heard(at_ms).split()) - expected))
            cut = SpokenAnswer()  # 1 s more was computed when the user spoke
            cut.add_text(text)
            left = (at_ms + 1000) * RATE // 1000
            for sentence, part in zip(voice.split_sentences(text), parts, strict=True):
                if left > 0:
                    cut.add_sound(part[:left], RATE, sentence)
                left -= len(part)
            early.append(abs(len(cut.heard(at_ms).split()) - expected))
    assert np.mean(np.array(differences) <= 1) >= 0.95
    assert np.mean(np.array(early) <= 1) >= 0.9
