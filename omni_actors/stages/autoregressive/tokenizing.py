"""The capabilities ``tokenize`` and ``detokenize`` of engines that read prompts.

``tokenize`` gives the tokens that a request with the same prompt would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest
from omni_actors.stages.bounds import ChatTemplateKwargs, Settings, TokenId
from omni_actors.stages.refusal import refuse_unknown_tokens, request_work, validated


class _Tokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: tuple[Settings, ...] = ()
    chat_template_kwargs: ChatTemplateKwargs = msgspec.field(default_factory=dict)
    add_special_tokens: bool = True
    """Whether a prompt gets special tokens. A chat template has its own."""


class _Detokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[TokenId]


def capabilities(
    vocabulary: Vocabulary,
    context: int,
    conversation_tokens: Callable[[Chunk, Sequence[Settings], ChatTemplateKwargs], list[int]],
) -> Mapping[str, Callable[..., Any]]:
    """Return the functions by name.

    context: the most tokens of a request. conversation_tokens: returns the tokens of a chunk with messages, of
    tools, with variables of the chat template; it raises InvalidRequest.
    """

    def tokenize(**given: Any) -> dict[str, Any]:
        asked = validated(given, _Tokenize)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("one of prompt and messages was expected", param="prompt")
        with request_work("prompt" if asked.messages is None else "messages"):
            tokens = _tokens(asked)
            texts = vocabulary.tokenizer.convert_ids_to_tokens(tokens)
        return {"tokens": tokens, "token_strs": texts, "max_model_len": context}

    def _tokens(asked: _Tokenize) -> list[int]:
        if asked.messages is None:
            tokens: list[int] = vocabulary.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
            return tokens
        chunk = Chunk(source=CLIENT, seq=0, last=True, tensors={}, data={"messages": asked.messages})
        return conversation_tokens(chunk, asked.tools, asked.chat_template_kwargs)

    def detokenize(**given: Any) -> str:
        asked = validated(given, _Detokenize)
        refuse_unknown_tokens(asked.tokens, vocabulary.size, "tokens")
        with request_work("tokens"):
            return vocabulary.decode(asked.tokens, skip_special_tokens=False)

    return {"tokenize": tokenize, "detokenize": detokenize}
