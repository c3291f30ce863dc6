"""Incremental detokenization: token ids to text, one token at a time, with stop strings.

Rules
1. Returned text is final: text that the next token could still change is pending.
2. All pieces joined are the text that decoding all ids at once gives, up to the stop string.
3. The cost of a token does not grow with the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from omni_actors.stages.autoregressive.options import TextParams

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CHARACTER = 4
"""The most bytes, and so the most tokens, of a UTF-8 character."""
_KEPT = 4 * _CHARACTER
"""The tokens that a shortened window keeps."""


class Detokenizer:
    """Turns one sequence's tokens into text, by decoding a window of the last tokens.

    decode: ids to text. The text of a longer list must begin with the text of a shorter one, apart from replacement
    characters at the end of the shorter one, which may be an incomplete character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._text = ""
        self._returned = 0

    def push(self, token: int) -> str:
        """Add a token; return the text that has become final with it."""
        self._window.append(token)
        self._text = self._decode(self._window)
        final = len(self._text.rstrip(_INCOMPLETE))
        complete = final == len(self._text)
        invalid = len(self._window) >= 2 * _KEPT
        if invalid:
            # Complete text would have been shortened before. So this text is invalid, and only its end may yet become
            # a character.
            final = max(final, len(self._text) - _CHARACTER + 1)
        piece = self._take(final)
        if invalid or (complete and len(self._window) >= _KEPT + 2 * _CHARACTER):
            self._shorten()
        return piece

    @property
    def has_pending(self) -> bool:
        """Whether text is pending: it may be the beginning of a character."""
        return self._returned < len(self._text)

    def finish(self) -> str:
        """Return the pending text. No token may follow."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        piece = self._text[self._returned : end]
        self._returned = max(self._returned, end)
        return piece

    def _shorten(self) -> None:
        """Drop all but the last tokens if later text cannot depend on the dropped ones.

        That is the case if the rest alone decodes to the same ending and this ending covers all pending text.
        """
        for kept in range(_KEPT, _KEPT + _CHARACTER):  # one of these cuts is between two characters
            window = self._window[-kept:]
            text = self._decode(window)
            dropped = len(self._text) - len(text)
            if self._text.endswith(text) and self._returned - dropped >= _CHARACTER:
                self._window, self._text, self._returned = window, text, self._returned - dropped
                return


class StopFilter:
    """Cuts a text before its first stop string. Text that may be the beginning of one is pending."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=1) - 1
        self._pending = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that is final, and whether a stop string was found. If so, no call may follow."""
        self._pending += text
        # The stop string that is complete first wins, however the text was cut into pieces; of several, the longest.
        found = [(place + len(stop), place) for stop in self._stops if (place := self._pending.find(stop)) >= 0]
        if found:
            return self._pending[: min(found)[1]], True
        size = min(self._longest, len(self._pending))
        while size and not self._begins_a_stop(self._pending[-size:]):
            size -= 1
        cut = len(self._pending) - size
        out, self._pending = self._pending[:cut], self._pending[cut:]
        return out, False

    @property
    def has_pending(self) -> bool:
        """Whether text is pending: it may be the beginning of a stop string or, at the end, is one."""
        return bool(self._pending)

    def finish(self) -> str:
        """Return the pending text. No text may follow."""
        pending, self._pending = self._pending, ""
        return pending

    def _begins_a_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)


class Vocabulary:
    """Which ids of a tokenizer end an answer, and which have no text.

    end_tokens: the model's end tokens (an id, several or None); the tokenizer's own is added. rows: of the model's
    embedding table, which may lack tokens that were added to the tokenizer. ``longest`` is the length of the longest
    token in characters: a text of n characters has at least n / ``longest`` tokens, unless the tokenizer normalizes
    text or replaces many characters by one unknown token. The model has the tokens below ``size``.
    """

    def __init__(self, tokenizer: Any, end_tokens: int | Sequence[int] | None, rows: int | None = None) -> None:
        several = [end_tokens] if isinstance(end_tokens, int) else list(end_tokens or ())
        self.end = frozenset(token for token in (*several, tokenizer.eos_token_id) if token is not None)
        self.silent = frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
        tokens = tokenizer.get_vocab()
        self.longest, self.size = max(map(len, tokens)), max(tokens.values()) + 1
        if rows is not None:
            self.size = min(self.size, rows)
        self.tokenizer = tokenizer

    def end_tokens(self, params: TextParams) -> frozenset[int]:
        """Return the tokens that end the answer to a request."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of these tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text


class AnswerText:
    """One request's text, token by token, up to an end token, a stop string or ``max_tokens``."""

    def __init__(self, vocabulary: Vocabulary, prompt_tokens: int, max_tokens: int, params: TextParams) -> None:
        self.finish_reason: str | None = None
        """"stop", "length", or None while the answer goes on."""
        self.tokens = self.certain_tokens = 0
        """The tokens of the answer, and the first ones of them whose text no stop string can cut off any more."""
        self._end_tokens = vocabulary.end_tokens(params)
        self._silent = vocabulary.silent if params.skip_special_tokens else frozenset()
        self._size = vocabulary.size
        self._prompt_tokens, self._max_tokens = prompt_tokens, max_tokens
        decode = partial(vocabulary.decode, skip_special_tokens=params.skip_special_tokens)
        self._detokenizer, self._stops = Detokenizer(decode), StopFilter(params.stop)
        self._has_stops = bool(params.stop)

    def push(self, token: int) -> dict[str, Any]:
        """Add a token; return the output's data: empty if no text became final, and complete at the end."""
        self.tokens += 1
        ended = token in self._end_tokens
        # Tokens without text stay out of the detokenizer: they would fill its window. A model may have more rows than
        # its tokenizer has tokens.
        is_silent = ended or token in self._silent or token >= self._size
        text = "" if is_silent else self._detokenizer.push(token)
        text, stopped = self._stops.push(text)
        if not stopped and (ended or self.tokens == self._max_tokens):
            rest, stopped = self._stops.push(self._detokenizer.finish())
            text += rest if stopped else rest + self._stops.finish()
            self.finish_reason = "stop" if ended else "length"
        if stopped:
            self.finish_reason = "stop"
        if not (self._stops.has_pending or (self._has_stops and self._detokenizer.has_pending)):
            self.certain_tokens = self.tokens
        if self.finish_reason is None:
            return {"text": text} if text else {}
        return {
            "text": text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.tokens,
        }
