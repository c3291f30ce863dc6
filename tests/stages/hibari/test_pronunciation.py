"""Text to phonemes: hibari's own result if there is one, and the fallbacks for texts for which it raises."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_actors.stages.hibari.pronunciation import LONGEST_PHRASE, LONGEST_WORD, Pronunciation

pytestmark = pytest.mark.voice


@pytest.fixture(scope="module")
def pronunciation(voice: Any) -> Pronunciation:
    return Pronunciation(voice)


@pytest.mark.parametrize("text", ["Dr. Smith paid $3.50 on 3/4/2024.", "x² is 5 km²", "①", str(10**36 - 1), "½"])
def test_a_text_that_hibari_converts_is_not_changed(pronunciation: Pronunciation, voice: Any, text: str) -> None:
    assert " ".join(pronunciation.phrases(text)) == " ".join(voice.phonemize(text))


@pytest.mark.parametrize(
    ("text", "simple"),
    [
        ("⑴ and ⑼", "1 and 9"),
        ("②x", "2 x"),
        (f"It is {10**36}.", "It is 1 0 0, " + "0 0 0, " * 11 + "0 ."),
        (f"{10**38:,} ships", "1 0 0, " + "0 0 0, " * 11 + "0 0 0 ships"),
        (")AM7İ°!", ")AM7I°!"),
    ],
)
def test_a_text_for_which_hibari_raises_is_simplified(
    pronunciation: Pronunciation, voice: Any, text: str, simple: str
) -> None:
    with pytest.raises((IndexError, ValueError, TypeError)):
        voice.phonemize(text)
    assert pronunciation.phrases(text) == pronunciation.phrases(simple) != []


def test_a_word_for_which_hibari_raises_is_left_out(
    pronunciation: Pronunciation, voice: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    phonemize = voice.phonemize

    def phonemize_most(text: str) -> Any:
        if "ship" in text:
            raise StopIteration
        return phonemize(text)

    expected = [*pronunciation.phrases("The"), *pronunciation.phrases("sails.")]
    monkeypatch.setattr(voice, "phonemize", phonemize_most)
    assert pronunciation.phrases("The ship sails.") == expected
    assert "StopIteration" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["...", "🙂", "漢字", "مرحبا", "[x](/ж/)", "[x](/ˈ/)", "\x00", "\ud800", ""])
def test_a_text_without_phonemes_gives_no_phrase(pronunciation: Pronunciation, text: str) -> None:
    assert pronunciation.phrases(text) == []


@pytest.mark.parametrize("text", ["%" * 300, "W" * 300, "1 " * 150, "9" * 300, "x" * 300])
def test_words_and_phrases_stay_short(
    pronunciation: Pronunciation, voice: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    texts: list[str] = []
    phonemize = voice.phonemize
    monkeypatch.setattr(voice, "phonemize", lambda text: texts.append(text) or phonemize(text))
    phrases = pronunciation.phrases(text)
    assert max(len(word) for text in texts for word in text.split()) <= LONGEST_WORD
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
def test_any_text_is_converted(pronunciation: Pronunciation, text: str) -> None:
    for phrase in pronunciation.phrases(text):
        assert re.search(r"[^\W\d_]", phrase)
