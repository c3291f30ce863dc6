"""A sentence as strings of phonemes, whatever is in it: hibari's front end reads it, and this keeps the result usable.

Rules
1. hibari reads a sentence as it is, wherever it can. Only a number that its number words do not reach is written digit
   by digit.
2. Where it raises, it reads the sentence again in plainer writing: a digit in a circle or in brackets as that digit.
3. Where it still raises, the words are read one by one, and those that raise are left out, with a traceback on stderr.
   A word that cannot be read costs a spoken answer that word, and never the answer.
4. A phrase has at most ``LONGEST_PHRASE`` phonemes, and a word at most ``LONGEST_WORD`` characters: time and memory of
   the network grow with the one, and hibari's time with the cube of the other.
5. What has no letter that the network knows is left out.
"""

from __future__ import annotations

import re
import traceback
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hibari import Hibari

__all__ = ["LONGEST_PHRASE", "LONGEST_WORD", "Reading"]

LONGEST_PHRASE = 400
"""Phonemes, about 30 s of speech. hibari itself splits longer ones, but at clause marks only."""
LONGEST_WORD = 48
"""Characters without white space between them; more are read as several words."""

_LETTERS = ("Ll", "Lu", "Lo")  # not "Lm": marks of stress and length
_LARGEST_NUMBER = 36
"""Digits: hibari's number words end below 10**36."""
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD}}}(?=\S)")
_NUMBER = re.compile(r"\d(?:,?\d)*")


class Reading:
    """Reads for one voice. Stateless but for hibari's own lexicon."""

    def __init__(self, voice: Hibari) -> None:
        self._voice = voice
        self._letters = {phoneme for phoneme in voice.vocab if unicodedata.category(phoneme) in _LETTERS}

    def phrases(self, sentence: str) -> list[str]:
        """The sentence's phrases, a string of phonemes each; [] where there is nothing to pronounce."""
        return [
            phrase
            for phonemes in self._phonemes(sentence)
            for phrase in _short(phonemes)
            if not self._letters.isdisjoint(phrase)
        ]

    def _phonemes(self, sentence: str) -> list[str]:
        readable = _NUMBER.sub(_digit_by_digit, sentence)
        plainer = "".join(map(_plain, readable))
        for text in (readable, plainer):
            with suppress(_Unreadable):
                return self._phonemize(text)
        return [phonemes for word in plainer.split() for phonemes in self._word(word)]

    def _word(self, word: str) -> list[str]:
        try:
            return self._phonemize(word)
        except _Unreadable:
            traceback.print_exc()
            return []

    def _phonemize(self, text: str) -> list[str]:
        try:
            found: list[str] = self._voice.phonemize(_LONG_WORD.sub(r"\g<0> ", text))
        except MemoryError:
            raise
        except Exception as error:  # hibari has no errors of its own: it raises whatever it runs into
            raise _Unreadable(text) from error
        return found


class _Unreadable(Exception):
    """hibari cannot read this text."""


def _plain(character: str) -> str:
    if character.isdigit() and not character.isdecimal():
        return f" {unicodedata.digit(character)} "
    return "I" if character == "\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}" else character  # two letters in lower case


def _digit_by_digit(number: re.Match[str]) -> str:
    digits = number[0].replace(",", "")
    if len(digits) <= _LARGEST_NUMBER:
        return number[0]
    groups = (digits[at : at + 3] for at in range(0, len(digits), 3))
    return " " + ", ".join(" ".join(group) for group in groups) + " "


def _short(phonemes: str) -> Iterator[str]:
    """All of it in phrases that are short enough, cut at a space where there is one."""
    while len(phonemes) > LONGEST_PHRASE:
        at = phonemes.rfind(" ", 1, LONGEST_PHRASE + 1)
        at = at if at > 0 else LONGEST_PHRASE
        yield phonemes[:at]
        phonemes = phonemes[at:].lstrip()
    yield phonemes
