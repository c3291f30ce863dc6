"""Which words of a spoken answer were heard when its playback was cut.

Rules
1. The words of a sentence are spread over its sound by their lengths. Pauses do not count: only sound that is loud
   enough to be speech carries words. So long pauses at commas and the silence at the end move no word.
2. A pipeline that names the sentence of each sound gives exact times of sentences. One that does not is treated as one
   long sentence.
3. A sentence whose sound is not complete is assumed to be as fast as the complete sentences before it and one second
   with ``LETTERS_PER_S``; and to have as much sound as there is, at least.
4. A word is heard when half of its sound was played.
"""

from __future__ import annotations

import bisect
import re
from typing import Any

import msgspec
import numpy as np

LETTERS_PER_S = 24.0
"""Letters, marks and spaces in a second of audible sound. With the pauses between words, these are about 15."""
_FRAME_S = 0.02
_AUDIBLE = 0.01
"""The RMS of a frame that carries speech, of a full scale of 1: -40 dB."""
_WORD, _SPACE = re.compile(r"\S+"), re.compile(r"\s")


class _Sentence(msgspec.Struct):
    """The sound of one sentence. ``text``: None if the pipeline does not name it. Frames are those of 20 ms."""

    text: str | None
    first_frame: int
    frames: int = 0
    end: int = 0
    """Where its words end in the answer's text. Set when the sentence is over."""


class SpokenAnswer:
    """Relates the text of one answer to its sound. Add both as they arrive, in order.

    It keeps the text, one byte for each 20 ms of sound, and the sentences. A sentence that is over is searched in the
    text once.
    """

    def __init__(self) -> None:
        self._text = ""
        self._audible = bytearray()
        """Whether each frame of the sound carries speech: 1 if it does."""
        self._rest = np.empty(0, np.float32)
        self._sentences: list[_Sentence] = []
        self._over = 0
        """How many sentences are over: a later one has been heard."""
        self._letters, self._frames = LETTERS_PER_S, round(1 / _FRAME_S)
        """The letters and the audible frames of those, and of one second at the usual pace (rule 3)."""
        self._complete = False

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text

    def add_text(self, delta: str) -> None:
        """Add the next part of the answer's text."""
        self._text += delta

    def add_sound(
        self, samples: np.ndarray[Any, np.dtype[np.float32]], sample_rate: int, sentence: str | None = None
    ) -> None:
        """Add the next part of the answer's sound.

        Args:
            samples: float32 (n,), in [-1, 1].
            sample_rate: Samples per second, the same in every call.
            sentence: The text of the sentence that begins with this sound; None: the sentence before goes on.
        """
        if sentence is not None or not self._sentences:
            self._sentences.append(_Sentence(sentence, len(self._audible)))
        size = round(sample_rate * _FRAME_S)
        sound = np.concatenate([self._rest, samples])
        whole = len(sound) - len(sound) % size
        self._rest = sound[whole:].copy()
        rms = np.sqrt(np.mean(np.square(sound[:whole].reshape(-1, size)), axis=1))
        self._audible += (rms >= _AUDIBLE).astype(np.uint8).tobytes()
        self._sentences[-1].frames = len(self._audible) - self._sentences[-1].first_frame

    def finish(self) -> None:
        """Say that all text and sound were added. So the length of the last sentence is known."""
        self._complete = True

    def heard(self, played_ms: float) -> str:
        """Return the text that was heard, a prefix of ``text``. It ends with a whole word, or is empty.

        played_ms: how much of the sound was played, in milliseconds. Beyond the sound's end, all of it was.
        """
        played = int(played_ms / 1000 / _FRAME_S)
        if self._complete and played >= len(self._audible):
            return self._text
        number = bisect.bisect_left(self._sentences, played, key=lambda sentence: sentence.first_frame) - 1
        if number < 0:
            return ""
        for sentence in self._sentences[self._over : number]:
            self._end(sentence)
        sentence, after = self._sentences[number], self._sentences[number - 1].end if number else 0
        start, stop = self._place(sentence, after)
        is_whole = self._complete or number + 1 < len(self._sentences)
        rate = None if is_whole else self._letters / self._frames
        count = self._heard_of(sentence, self._text[start:stop], played, rate)
        return self._text[: start + count if count else after]

    def _end(self, sentence: _Sentence) -> None:
        """Settle where the next sentence ends that is over."""
        start, sentence.end = self._place(sentence, self._sentences[self._over - 1].end if self._over else 0)
        self._letters += _letters(self._text[start : sentence.end])
        self._frames += self._audible_in(sentence)
        self._over += 1

    def _audible_in(self, sentence: _Sentence, until: int | None = None) -> int:
        """Return how many frames of a sentence are audible. until: only those before this one count."""
        last = sentence.first_frame + sentence.frames
        return self._audible.count(1, sentence.first_frame, last if until is None else min(until, last))

    def _place(self, sentence: _Sentence, after: int) -> tuple[int, int]:
        """Return where a sentence is in the text, at ``after`` or later, in whole words.

        Only letters and digits are compared, because what is spoken is cleaned of marks and double spaces.
        """
        if sentence.text is None:
            return after, len(self._text)
        if (found := _find(self._text, after, sentence.text)) is None:
            return after, after
        start = max((space.end() for space in _SPACE.finditer(self._text, after, found[0])), default=after)
        end = _SPACE.search(self._text, found[1])
        return start, len(self._text) if end is None else end.start()

    def _heard_of(self, sentence: _Sentence, text: str, played: int, rate: float | None) -> int:
        """Return how many characters of a sentence were heard.

        rate: the letters in an audible frame, if the sound is not complete; None if it is.
        """
        words = list(_WORD.finditer(text))
        total: float = self._audible_in(sentence)
        if rate is not None:
            total = max(total, _letters(text) / rate)
        if not words or not total:
            is_over = rate is None and played >= sentence.first_frame + sentence.frames
            return len(text) if words and is_over else 0
        lengths = np.array([len(word[0]) + 1 for word in words], float)
        middles = (np.cumsum(lengths) - lengths / 2) / lengths.sum() * total
        count = int(np.searchsorted(middles, self._audible_in(sentence, played), side="right"))
        return words[count - 1].end() if count else 0


def _find(text: str, after: int, sentence: str) -> tuple[int, int] | None:
    """Return where the letters and digits of a sentence are in a text first, from ``after`` on; None: nowhere.

    A sentence is mostly near, so an ever larger part is searched. The cost grows with the length of the text alone.
    """
    wanted = "".join(filter(str.isalnum, sentence))
    size = 2 * len(sentence)
    while wanted:
        part = text[after : after + size]
        at = "".join(filter(str.isalnum, part)).find(wanted)
        if at >= 0:
            places = [place for place, character in enumerate(part, after) if character.isalnum()]
            return places[at], places[at + len(wanted) - 1] + 1
        if after + size >= len(text):
            break
        size *= 4
    return None


def _letters(text: str) -> int:
    """Return the letters and marks of the words of a text, and a space behind each word."""
    return sum(len(word[0]) + 1 for word in _WORD.finditer(text))
