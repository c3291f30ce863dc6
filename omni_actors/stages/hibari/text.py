"""Splitting text that arrives in pieces into sentences to speak.

Rules
1. A sentence is returned as soon as the text after it shows that it is complete, or the text ends.
2. The sentences do not depend on how the text was cut into pieces.
3. Marks of Markdown are removed: ``*`` and backticks everywhere; headings (``#``), bullets (``-``, ``+``, ``•``) and
   quotes (``>``) at the start of a line. hibari itself leaves out the address of a link.
4. A sentence of more than ``LONGEST`` characters is cut: after the last clause mark, else at the last space, else at
   the limit. So speech does not wait for a full stop that never comes, and no phrase is too long to compute.
5. A sequence of white space becomes one space, or one line break if it has one. So little text is pending, and the
   time grows linearly with the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

LONGEST = 300
"""Characters; about 20 seconds of speech."""

_EVERYWHERE = str.maketrans("", "", "*`")
_WHITE_SPACE = re.compile(r"\s+")
_LINE_START = re.compile(r"^(?:(?:#{1,6}|[-+•>])\s+)+")
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)]*\s*$")
_CLAUSE_END = re.compile(r"[,;:—](?=\s)")


class SentenceSplitter:
    """Splits one text. split: returns the sentences of a text, such as ``Hibari.split_sentences``."""

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self._split = split
        self._rest = ""

    def feed(self, piece: str) -> list[str]:
        """Add a piece of text. Return the sentences that it completes."""
        text = _WHITE_SPACE.sub(_single, self._rest + piece.translate(_EVERYWHERE))
        *complete, tail = self._split(text) or [""]
        # ``split`` strips the tail, whose white space may belong to the end of a line. Take it from the text.
        rest = text[len(text.rstrip()) - len(tail) :] if tail else ""
        parts = [part for sentence in complete for part in _cut(sentence)]
        *cut_off, self._rest = _cut(rest)
        return _speakable([*parts, *cut_off])

    @property
    def candidate(self) -> str | None:
        """The pending text, if it looks like a whole sentence: what is most likely returned next."""
        sentences = _speakable([self._rest]) if _SENTENCE_END.search(self._rest) else []
        return sentences[0] if sentences else None

    def finish(self) -> list[str]:
        """End the text. Return its last sentences."""
        rest, self._rest = self._rest, ""
        return _speakable([rest])


def _single(white_space: re.Match[str]) -> str:
    return "\n" if "\n" in white_space[0] else " "


def _cut(text: str) -> list[str]:
    """Cut a text into parts that are short enough. The last part keeps its trailing white space."""
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
