"""Text that arrives in pieces of any size, as sentences that can be spoken.

Rules
1. A sentence is given out as soon as the text after it shows that it is complete, or the text ends.
2. Where the pieces were cut makes no difference to the sentences.
3. Marks of Markdown are not read out: ``*`` and backticks go wherever they stand; headings (``#``), bullets
   (``-``, ``+``, ``•``) and quotes (``>``) go at the start of a line. A link's address is left out by hibari itself.
4. A sentence of more than ``LONGEST`` characters is cut: after the last clause mark in them, else at the last space,
   else right there. So speech does not wait for a full stop that never comes, and no phrase is too long to compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["LONGEST", "SentenceReader"]

LONGEST = 300
"""Characters: about 20 seconds of speech."""

_EVERYWHERE = str.maketrans("", "", "*`")
_LINE_START = re.compile(r"^(?:(?:#{1,6}|[-+•>])\s+)+")
_CLAUSE_END = re.compile(r"[,;:—](?=\s)")


class SentenceReader:
    """split: what finds the sentences in a text, ``Hibari.split_sentences`` or the like."""

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self._split = split
        self._rest = ""

    def read(self, piece: str) -> list[str]:
        """The sentences that ``piece`` completes."""
        text = self._rest + piece.translate(_EVERYWHERE)
        *complete, tail = self._split(text) or [""]
        # The tail comes back stripped; its own white space may yet turn out to be the end of a line.
        self._rest = text[len(text.rstrip()) - len(tail) :] if tail else ""
        sentences = [part for sentence in complete for part in _speakable(sentence)]
        while len(self._rest.rstrip()) > LONGEST:
            first, self._rest = _cut(self._rest)
            sentences += _speakable(first)
        return sentences

    def finish(self) -> list[str]:
        """What is left when the text has ended."""
        rest, self._rest = self._rest, ""
        return _speakable(rest)


def _cut(text: str) -> tuple[str, str]:
    head = text[:LONGEST]
    clauses = [match.end() for match in _CLAUSE_END.finditer(head)]
    at = clauses[-1] if clauses else head.rfind(" ")
    at = at if at > 0 else LONGEST
    return text[:at], text[at:].lstrip()


def _speakable(sentence: str) -> list[str]:
    parts = []
    while len(sentence) > LONGEST:
        first, sentence = _cut(sentence)
        parts.append(first)
    return [part for raw in (*parts, sentence) if (part := _LINE_START.sub("", raw.strip()))]
