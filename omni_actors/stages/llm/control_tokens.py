"""Control tokens in the texts of a conversation, which are encoded as plain characters.

Rules
1. A client's text has no control token ("<|im_start|>"), so it cannot begin a turn of another role. The control tokens
   are those of transformers' ``sanitize_control_tokens``: special tokens, and tokens that the chat template has.
2. In an assistant's message the special tokens alone are plain characters. Others ("</think>", "<tool_call>") are in
   the text of answers, which clients send back and chat templates read.
3. transformers' marks surround the control tokens of texts before the template renders them. A conversation without
   such texts has the tokens of its rendered text.
4. So it is with the texts in ``chat_template_kwargs``. But a template may print a list as Python does, which escapes
   the marks: a text in a list must have no control token.
5. Each marked text is encoded by itself, in the engine's loop. So a conversation has ``MOST_MARKED`` of them at most.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.llm.chat_template import RenderedMessage

MOST_MARKED = 1000
"""They take 25 ms."""
_START, _, _END = mark_control_tokens(".", re.compile(r"\."))
"""The marks before and behind a control token."""


class ControlTokens:
    """The control tokens of a tokenizer with a chat template. There are few of both: see ``of``."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._special = _any_of([str(each) for each in tokenizer.added_tokens_decoder.values() if each.special])
        self._all = _any_of(tokenizer._get_control_tokens(template))

    @classmethod
    @functools.lru_cache(maxsize=8)  # some tokenizers have tens of thousands of added tokens
    def of(cls, tokenizer: Any, template: str) -> ControlTokens:
        """Return those of a tokenizer, made once for each template."""
        return cls(tokenizer, template)

    def marked_messages(self, messages: Sequence[RenderedMessage]) -> list[RenderedMessage]:
        """Return messages with marks in their texts."""
        return [_marked(each, self._special if each["role"] == "assistant" else self._all) for each in messages]

    def marked(self, value: Any) -> Any:
        """Return a JSON value with marks in its texts."""
        return _marked(value, self._all)

    def marked_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return variables of the chat template with marks in their texts. Raises InvalidRequest (rule 4)."""
        for name, value in kwargs.items():
            texts = [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
            if any(map(self._all.search, texts)):
                message = f"chat_template_kwargs: a text in the list {name!r} has a control token"
                raise InvalidRequest(message, param="chat_template_kwargs")
        return {name: self.marked(value) for name, value in kwargs.items()}


def length(text: str) -> int:
    """Return how many characters a text has without its marks."""
    return len(text) - text.count(_START) - text.count(_END)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a rendered text with marks.

    Raises InvalidRequest: there are too many marks, or the tokenizer has no other tokens for a marked text.
    """
    if not (marked := text.count(_START)):
        plain: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return plain
    if marked > MOST_MARKED:
        message = f"messages: {marked} control tokens in texts; at most {MOST_MARKED} are accepted"
        raise InvalidRequest(message, param="messages")
    try:
        tokens: list[int] = encode_marked_chat(tokenizer, text)
    except ValueError as error:
        raise InvalidRequest(f"messages: {error}", param="messages") from error
    return tokens


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of some texts, which takes the longest one that is there."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _marked(value: Any, pattern: re.Pattern[str]) -> Any:
    """Return a JSON value with marks in its texts, names of objects among them."""
    if isinstance(value, dict):
        return {_marked(name, pattern): _marked(each, pattern) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(each, pattern) for each in value]
    return mark_control_tokens(value, pattern)
