"""Token ids to text, a token at a time.

Rules
1. What has been given out is never taken back: text that the next token could still change is held.
2. All the pieces together are what decoding all the ids at once gives, up to the stop string.
3. The cost of a token does not grow with the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Answer", "Detokenizer", "StopFilter", "Vocabulary"]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CHARACTER = 4
"""The most bytes, and so the most tokens, that a UTF-8 character takes."""
_KEPT = 4 * _CHARACTER


class Detokenizer:
    """Decodes a window of the last tokens, since a token's text can depend on those before it.

    decode: ids to text. A longer list must give what a shorter one gave and more, but for replacement characters at the
    end of the shorter one's: they may be a character that is not complete yet.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._text = ""
        self._given = 0

    def push(self, token: int) -> str:
        """Return the text that is certain now and was not before."""
        self._window.append(token)
        self._text = self._decode(self._window)
        certain = len(self._text.rstrip(_BROKEN))
        whole = certain == len(self._text)
        hopeless = len(self._window) >= 2 * _KEPT
        if hopeless:
            # Whole text would have been shortened: this is broken for good, and only its end may be a character yet.
            certain = max(certain, len(self._text) - _CHARACTER + 1)
        piece = self._take(certain)
        if hopeless or (whole and len(self._window) >= _KEPT + 2 * _CHARACTER):
            self._shorten()
        return piece

    def finish(self) -> str:
        """Return what was held: no more tokens come."""
        return self._take(len(self._text))

    def _take(self, certain: int) -> str:
        piece = self._text[self._given : certain]
        self._given = max(self._given, certain)
        return piece

    def _shorten(self) -> None:
        """Forget all but the last tokens, where the text that is still to come cannot depend on the others.

        That is so if the rest alone decodes to the same ending, and that ending reaches back beyond all that is held.
        """
        for kept in range(_KEPT, _KEPT + _CHARACTER):  # one of these cuts is not inside a character
            newer = self._window[-kept:]
            text = self._decode(newer)
            forgotten = len(self._text) - len(text)
            if self._text.endswith(text) and self._given - forgotten >= _CHARACTER:
                self._window, self._text, self._given = newer, text, self._given - forgotten
                return


class StopFilter:
    """Cuts the text before the first stop string, and holds back what may turn out to be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may go out, and whether a stop string was found (then nothing more may follow)."""
        self._held += text
        # The one that is complete first wins, however the text was cut into pieces; of several, the longest.
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            return self._held[: min(found)[1]], True
        size = min(self._longest, len(self._held))
        while size and not self._begins_a_stop(self._held[-size:]):
            size -= 1
        cut = len(self._held) - size
        out, self._held = self._held[:cut], self._held[cut:]
        return out, False

    @property
    def holds(self) -> bool:
        """Whether text is held, which may be the beginning of a stop string or, at the end, is one."""
        return bool(self._held)

    def finish(self) -> str:
        """Return what was held: no more text comes, so no stop string does."""
        held, self._held = self._held, ""
        return held

    def _begins_a_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)


class Vocabulary:
    """What a tokenizer's ids mean. end_tokens: the model's own, an id, several or None; the tokenizer's is added.

    longest: characters of the longest token. A text has at least its length divided by this in tokens, unless the
    tokenizer shortens what it reads (by normalizing it, or by one unknown token for many characters).
    """

    def __init__(self, tokenizer: Any, end_tokens: int | Sequence[int] | None) -> None:
        several = [end_tokens] if isinstance(end_tokens, int) else list(end_tokens or ())
        self.end = frozenset([*several, tokenizer.eos_token_id])
        self.silent = frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
        self.longest = max(map(len, tokenizer.get_vocab()))
        self._tokenizer = tokenizer

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class Answer:
    """One request's text as its tokens come, and its end: a token that ends answers, a stop string, or the limit."""

    def __init__(self, vocabulary: Vocabulary, prompt_tokens: int, max_tokens: int, stops: Sequence[str]) -> None:
        self.finish_reason: str | None = None
        self._vocabulary = vocabulary
        self._prompt_tokens, self._tokens, self._max_tokens = prompt_tokens, 0, max_tokens
        self._detokenizer, self._stops = Detokenizer(vocabulary.decode), StopFilter(stops)

    @property
    def holds(self) -> bool:
        """Whether tokens are held back that may belong to a stop string or, at the end, do."""
        return self._stops.holds

    def push(self, token: int) -> dict[str, Any]:
        """Return the output's data, empty where no text became certain. ``finish_reason`` is set at the end."""
        self._tokens += 1
        ended = token in self._vocabulary.end
        # Kept from the window, since tokens without text would fill it.
        text = "" if ended or token in self._vocabulary.silent else self._detokenizer.push(token)
        text, stopped = self._stops.push(text)
        if not stopped and (ended or self._tokens == self._max_tokens):
            rest, stopped = self._stops.push(self._detokenizer.finish())
            text += rest if stopped else rest + self._stops.finish()
            self.finish_reason = "stop" if ended else "length"
        if stopped:
            self.finish_reason = "stop"
        if self.finish_reason is None:
            return {"text": text} if text else {}
        return {
            "text": text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._tokens,
        }
