"""Text that arrives in pieces of any size, as sentences that can be spoken.

Rules
1. A sentence is given out as soon as the text after it shows that it is complete, or the text ends.
2. Where the pieces were cut makes no difference to the sentences.
3. Marks of Markdown are not read out: ``*`` and backticks go wherever they stand; headings (``#``), bullets
   (``-``, ``+``, ``•``) and quotes (``>``) go at the start of a line. A link's address is left out by hibari itself.
4. A sentence of more than ``LONGEST`` characters is cut: after the last clause mark in them, else at the last space,
   else right there. So speech does not wait for a full stop that never comes, and no phrase is too long to compute.
5. White space in a row is one space, or one line break if it has one. So what is held back of a text stays small, and
   the time that a text takes grows with its length and no faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

__all__ = ["LONGEST", "SentenceReader"]

LONGEST = 300
"""Characters: about 20 seconds of speech."""

_EVERYWHERE = str.maketrans("", "", "*`")
_WHITE_SPACE = re.compile(r"\s+")
_LINE_START = re.compile(r"^(?:(?:#{1,6}|[-+•>])\s+)+")
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)]*\s*$")
_CLAUSE_END = re.compile(r"[,;:—](?=\s)")


class SentenceReader:
    """split: what finds the sentences in a text, ``Hibari.split_sentences`` or the like."""

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self._split = split
        self._rest = ""

    def read(self, piece: str) -> list[str]:
        """The sentences that ``piece`` completes."""
        text = _WHITE_SPACE.sub(_single, self._rest + piece.translate(_EVERYWHERE))
        *complete, tail = self._split(text) or [""]
        # The tail comes back stripped; its own white space may yet turn out to be the end of a line.
        rest = text[len(text.rstrip()) - len(tail) :] if tail else ""
        parts = [part for sentence in complete for part in _cut(sentence)]
        *cut_off, self._rest = _cut(rest)
        return _speakable([*parts, *cut_off])

    @property
    def likely(self) -> str | None:
        """The rest, where it looks like a whole sentence: what ``read`` or ``finish`` will most likely give next."""
        sentences = _speakable([self._rest]) if _SENTENCE_END.search(self._rest) else []
        return sentences[0] if sentences else None

    def finish(self) -> list[str]:
        """What is left when the text has ended."""
        rest, self._rest = self._rest, ""
        return _speakable([rest])


def _single(white_space: re.Match[str]) -> str:
    return "\n" if "\n" in white_space[0] else " "


def _cut(text: str) -> list[str]:
    """All of the text in parts that are short enough; the last keeps the white space at its end."""
    parts, start, end = [], 0, len(text.rstrip())
    while end - start > LONGEST:
        head = text[start : start + LONGEST]
        clauses = [match.end() for match in _CLAUSE_END.finditer(head)]
        at = clauses[-1] if clauses else head.rfind(" ")
        at = at if at > 0 else LONGEST
        parts.append(head[:at])
        start += at
        start += text[start].isspace()
    return [*parts, text[start:]]


def _speakable(parts: Iterable[str]) -> list[str]:
    return [part for raw in parts if (part := _LINE_START.sub("", raw.strip()))]
