"""What hibari's front end makes of a sentence, and what is done where it can make nothing of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_actors.stages.hibari.reading import LONGEST_PHRASE, LONGEST_WORD, Reading

pytestmark = pytest.mark.voice


@pytest.fixture(scope="module")
def voice() -> Any:
    from hibari import Hibari

    return Hibari(threads=1)


@pytest.fixture(scope="module")
def reading(voice: Any) -> Reading:
    return Reading(voice)


@pytest.mark.parametrize("text", ["Dr. Smith paid $3.50 on 3/4/2024.", "x² is 5 km²", "①", str(10**36 - 1), "½"])
def test_what_hibari_can_read_is_read_as_it_reads_it(reading: Reading, voice: Any, text: str) -> None:
    assert " ".join(reading.phrases(text)) == " ".join(voice.phonemize(text))


@pytest.mark.parametrize(
    ("text", "plainer"),
    [
        ("⑴ and ⑼", "1 and 9"),
        ("②x", "2 x"),
        (f"It is {10**36}.", "It is 1 0 0, " + "0 0 0, " * 11 + "0 ."),
        (f"{10**38:,} ships", "1 0 0, " + "0 0 0, " * 11 + "0 0 0 ships"),
        (")AM7İ°!", ")AM7I°!"),
    ],
)
def test_what_it_cannot_read_is_read_in_plainer_writing(reading: Reading, voice: Any, text: str, plainer: str) -> None:
    with pytest.raises((IndexError, ValueError, TypeError)):
        voice.phonemize(text)
    assert reading.phrases(text) == reading.phrases(plainer) != []


def test_a_word_that_cannot_be_read_is_left_out(
    reading: Reading, voice: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    phonemize = voice.phonemize

    def phonemize_most(text: str) -> Any:
        if "ship" in text:
            raise StopIteration
        return phonemize(text)

    expected = [*reading.phrases("The"), *reading.phrases("sails.")]
    monkeypatch.setattr(voice, "phonemize", phonemize_most)
    assert reading.phrases("The ship sails.") == expected
    assert "StopIteration" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["...", "🙂", "漢字", "مرحبا", "[x](/ж/)", "[x](/ˈ/)", "\x00", "\ud800", ""])
def test_what_has_no_sound_gives_no_phrase(reading: Reading, text: str) -> None:
    assert reading.phrases(text) == []


@pytest.mark.parametrize("text", ["%" * 300, "W" * 300, "1 " * 150, "9" * 300, "x" * 300])
def test_words_and_phrases_stay_short(reading: Reading, voice: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    read: list[str] = []
    phonemize = voice.phonemize
    monkeypatch.setattr(voice, "phonemize", lambda text: read.append(text) or phonemize(text))
    phrases = reading.phrases(text)
    assert max(len(word) for text in read for word in text.split()) <= LONGEST_WORD
    assert len(phrases) > 1
    assert max(map(len, phrases)) <= LONGEST_PHRASE


TEXT = st.lists(
    st.one_of(
        st.text(max_size=4),
        st.sampled_from(list("0123456789.,:/-–$£€%°'()[]⑴②²½İǅﬁ٣३🄀")),
        st.sampled_from(
            ["1000", "st", "th", "[x](/ˈ/)", "ing", "'s", "March ", "VIII", "Dr. ", "a.m.", "USD", " ", "9" * 40]
        ),
    ),
    max_size=12,
).map("".join)


@settings(max_examples=300)
@given(text=TEXT)
def test_any_text_is_read(reading: Reading, text: str) -> None:
    for phrase in reading.phrases(text):
        assert re.search(r"[^\W\d_]", phrase)
