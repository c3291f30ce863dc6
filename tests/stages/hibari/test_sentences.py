"""A streamed text is read sentence by sentence."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.stages.hibari.text import LONGEST, SentenceSplitter

pytestmark = pytest.mark.voice


def read(text: str, cuts: list[int] | None = None) -> list[str]:
    from hibari import Hibari

    splitter = SentenceSplitter(Hibari.split_sentences)
    at = [0, *sorted(cut % (len(text) + 1) for cut in cuts or []), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    return [sentence for piece in pieces for sentence in splitter.feed(piece)] + splitter.finish()


WORDS = st.lists(
    st.sampled_from(
        ["Hello", "dr", "Dr.", "J.", "it", "It", "is.", "Is!", "so,", "3.", "14", "\n", "-", "**x**", ":-)"]
    ),
    max_size=120,
).map(" ".join)


@given(text=WORDS, cuts=st.lists(st.integers(0, 10**6), max_size=12))
def test_sentences_do_not_depend_on_how_the_text_was_cut(text: str, cuts: list[int]) -> None:
    assert read(text, cuts) == read(text)


def test_a_sentence_is_returned_when_the_next_one_begins() -> None:
    from hibari import Hibari

    splitter = SentenceSplitter(Hibari.split_sentences)
    returned = [splitter.feed(piece) for piece in ("Dr. Smith is", " in. ", "H", "e is well.", "\n", "Good")]
    assert returned == [[], [], ["Dr. Smith is in."], [], [], ["He is well."]]
    assert splitter.finish() == ["Good"]
    assert splitter.finish() == []


def test_markdown_marks_are_removed() -> None:
    text = "# A *title*\n\n- **one** `thing`\n* another\n> quoted\n+ a - b\n1 - 2"
    assert read(text) == ["A title", "one thing", "another", "quoted", "a - b", "1 - 2"]


def test_a_long_sentence_is_cut_before_it_ends() -> None:
    from hibari import Hibari

    splitter = SentenceSplitter(Hibari.split_sentences)
    clause = "and then it rained, "
    parts = splitter.feed(clause * 40)
    assert len(parts) == 2
    assert all(part.endswith("rained,") and len(part) <= LONGEST for part in parts)
    assert " ".join([*parts, *splitter.finish()]) == (clause * 40).strip()
    assert [len(part) for part in read("x" * (2 * LONGEST + 5))] == [LONGEST, LONGEST, 5]
    assert " ".join(read("word " * 200)) == ("word " * 200).strip()


@given(text=WORDS, spaces=st.lists(st.text(" \t\r\n\u2028", min_size=1, max_size=3), min_size=1, max_size=5))
def test_a_sequence_of_white_space_becomes_one_space_or_one_line_break(text: str, spaces: list[str]) -> None:
    words, gaps = text.split(), list(itertools.islice(itertools.cycle(spaces), len(text.split())))
    wide = "".join(word + gap for word, gap in zip(words, gaps, strict=True))
    narrow = "".join(word + ("\n" if "\n" in gap else " ") for word, gap in zip(words, gaps, strict=True))
    assert read(wide, [len(wide) // 2]) == read(narrow)


def test_little_text_is_held_back() -> None:
    from hibari import Hibari

    seen: list[int] = []

    def split(text: str) -> list[str]:
        seen.append(len(text))
        return list(Hibari.split_sentences(text))

    splitter = SentenceSplitter(split)
    for piece in ("word", " ", "\n", "\t", "-") * 400:
        splitter.feed(piece)
    for piece in ("\n", " ") * 1000:
        splitter.feed(piece)
    assert max(seen) <= LONGEST + len(" word")


@pytest.mark.perf
@pytest.mark.parametrize("end", ["", "later! The end."], ids=["open", "complete"])
def test_cutting_a_long_text_takes_linear_time(end: str) -> None:
    """Ten times the length takes ten times as long. If each cut copied the rest, it would take 40 times and more."""

    def spent(words: int) -> float:
        text = "now " * words + end
        before = time.process_time()
        parts = read(text)
        after = time.process_time()
        assert max(map(len, parts)) <= LONGEST
        assert " ".join(parts) == text.strip()
        return after - before

    assert spent(1_000_000) < 25 * min(spent(100_000) for _ in range(3))
