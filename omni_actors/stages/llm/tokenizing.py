"""The capabilities ``tokenize`` and ``detokenize`` of engines that read the prompts of this package.

``tokenize`` gives the tokens that a request with the same prompt would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest
from omni_actors.stages.bounds import TokenId
from omni_actors.stages.llm.options import Tools
from omni_actors.stages.llm.prompt import Prompt
from omni_actors.stages.refusal import request_work, validated


class _Tokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Tools = ()
    add_special_tokens: bool = True
    """Of a prompt; a chat template has its own special tokens."""


class _Detokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[TokenId]


def capabilities(vocabulary: Vocabulary, system_prompt: str, context: int) -> Mapping[str, Callable[..., Any]]:
    """Return the functions by name. context: the most tokens of a request."""

    def tokenize(**given: Any) -> dict[str, Any]:
        asked = validated(given, _Tokenize)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("one of prompt and messages was expected", param="prompt")
        with request_work("prompt" if asked.messages is None else "messages"):
            tokens = _tokens(asked)
            texts = vocabulary.tokenizer.convert_ids_to_tokens(tokens)
        return {"tokens": tokens, "token_strs": texts, "max_model_len": context}

    def _tokens(asked: _Tokenize) -> Sequence[int]:
        if asked.messages is None:
            tokens: list[int] = vocabulary.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
            return tokens
        prompt = Prompt([CLIENT])
        prompt.feed(Chunk(source=CLIENT, seq=0, last=True, tensors={}, data={"messages": asked.messages}))
        text = prompt.render(vocabulary.tokenizer, system_prompt, asked.tools)
        found: list[int] = vocabulary.tokenizer.encode(text, add_special_tokens=False)
        return found

    def detokenize(**given: Any) -> str:
        asked = validated(given, _Detokenize)
        if unknown := [token for token in asked.tokens if token >= vocabulary.size]:
            message = f"tokens: the model has no token {unknown[0]}; it has {vocabulary.size}"
            raise InvalidRequest(message, param="tokens")
        with request_work("tokens"):
            return vocabulary.decode(asked.tokens, skip_special_tokens=False)

    return {"tokenize": tokenize, "detokenize": detokenize}
