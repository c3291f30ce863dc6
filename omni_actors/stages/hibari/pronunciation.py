"""Text to phonemes, with hibari's front end, for any text that a client or a model may send.

Rules
1. hibari converts a sentence as it is, if it can. Only a number beyond its number words is spelled digit by digit.
2. If hibari raises, it converts the sentence again in a simpler form: a circled or bracketed digit as that digit.
3. If it raises again, it converts the words one by one. A word for which it raises is left out, and the traceback is
   printed on stderr. So one word that cannot be pronounced costs a spoken answer that word only.
4. A phrase has at most ``LONGEST_PHRASE`` phonemes, because time and memory of the network grow with them. A word has
   at most ``LONGEST_WORD`` characters, because hibari's time grows with their cube.
5. A phrase without a letter that the network knows is left out.
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

LONGEST_PHRASE = 400
"""Phonemes; about 30 s of speech. hibari itself splits longer phrases at clause marks only."""
LONGEST_WORD = 48
"""Characters. A longer word is split."""

_LETTERS = ("Ll", "Lu", "Lo")  # without "Lm": marks of stress and length
_LARGEST_NUMBER = 36
"""Digits. hibari has number words below 10**36."""
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD}}}(?=\S)")
_NUMBER = re.compile(r"\d(?:,?\d)*")


class Pronunciation:
    """Converts text for one voice. voice: a loaded ``hibari.Hibari``."""

    def __init__(self, voice: Hibari) -> None:
        self._voice = voice
        self._letters = {phoneme for phoneme in voice.vocab if unicodedata.category(phoneme) in _LETTERS}

    def phrases(self, sentence: str) -> list[str]:
        """Return the phrases of a sentence, a string of phonemes each. [] if there is nothing to pronounce.

        Raises MemoryError only.
        """
        return [
            phrase
            for phonemes in self._phonemes(sentence)
            for phrase in _split(phonemes)
            if not self._letters.isdisjoint(phrase)
        ]

    def _phonemes(self, sentence: str) -> list[str]:
        spelled = _NUMBER.sub(_digit_by_digit, sentence)
        simple = "".join(map(_simpler, spelled))
        for text in (spelled, simple):
            with suppress(_Unpronounceable):
                return self._phonemize(text)
        return [phonemes for word in simple.split() for phonemes in self._word(word)]

    def _word(self, word: str) -> list[str]:
        try:
            return self._phonemize(word)
        except _Unpronounceable:
            traceback.print_exc()
            return []

    def _phonemize(self, text: str) -> list[str]:
        try:
            found: list[str] = self._voice.phonemize(_LONG_WORD.sub(r"\g<0> ", text))
        except MemoryError:
            raise
        except Exception as error:  # hibari has no error classes of its own
            raise _Unpronounceable(text) from error
        return found


class _Unpronounceable(Exception):
    """hibari raised for this text."""


def _simpler(character: str) -> str:
    """Return a character that hibari can convert, in place of one that it cannot (rule 2)."""
    if character.isdigit() and not character.isdecimal():
        return f" {unicodedata.digit(character)} "
    # The lower case of this letter has two letters.
    return "I" if character == "\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}" else character


def _digit_by_digit(number: re.Match[str]) -> str:
    digits = number[0].replace(",", "")
    if len(digits) <= _LARGEST_NUMBER:
        return number[0]
    groups = (digits[at : at + 3] for at in range(0, len(digits), 3))
    return " " + ", ".join(" ".join(group) for group in groups) + " "


def _split(phonemes: str) -> Iterator[str]:
    """Split phonemes into phrases of at most ``LONGEST_PHRASE``, at spaces if there are any."""
    while len(phonemes) > LONGEST_PHRASE:
        at = phonemes.rfind(" ", 1, LONGEST_PHRASE + 1)
        at = at if at > 0 else LONGEST_PHRASE
        yield phonemes[:at]
        phonemes = phonemes[at:].lstrip()
    yield phonemes
