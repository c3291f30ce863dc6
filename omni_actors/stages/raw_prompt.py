"""A raw prompt, which bypasses the chat template, collected from the chunks that a client sends.

Chunks, of one kind for the whole prompt; the parts of several chunks are joined in order:

========= ==============================================================================================
text      ``data["prompt"]``: text with the special tokens that the model expects
token ids ``tensors["token_ids"]``: int64 (n,)
embeds    ``tensors["embeds"]``: the model's input embeddings, floating point (n, hidden)
========= ==============================================================================================
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
from torch import Tensor

from omni_actors.stages.autoregressive.options import DEFAULT_TOKENIZATION, TokenizationKwargs
from omni_actors.stages.base import Chunk, InvalidRequest
from omni_actors.stages.refusal import refuse_unknown_tokens, validated
from omni_actors.stages.tensors import to_torch


class _TextData(msgspec.Struct, frozen=True):
    prompt: str


class RawPrompt:
    """The raw prompt of one request; false if the client has sent none."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.token_ids: list[int] = []
        self._embeds: list[Tensor] = []

    def __bool__(self) -> bool:
        return self.text is not None or bool(self.token_ids or self._embeds)

    @property
    def is_embedded(self) -> bool:
        """Whether the prompt is embeddings."""
        return bool(self._embeds)

    def feed(self, chunk: Chunk) -> None:
        """Take what a chunk has of the prompt. Raises InvalidRequest."""
        if "prompt" in chunk.data:
            self.text = (self.text or "") + validated(chunk.data, _TextData).prompt
        if (sent := chunk.tensors.get("token_ids")) is not None:
            ids = to_torch(sent)
            if ids.dtype != torch.int64 or ids.ndim != 1:
                message = f"token_ids: int64 (n,) was expected, not {sent.dtype} {sent.shape}"
                raise InvalidRequest(message, param="prompt_token_ids")
            self.token_ids += ids.tolist()
        if (sent := chunk.tensors.get("embeds")) is not None:
            embeds = to_torch(sent)
            if not embeds.is_floating_point() or embeds.ndim != 2 or not len(embeds) or not embeds.isfinite().all():
                message = f"embeds: finite floating point (n, hidden) was expected, not {sent.dtype} {sent.shape}"
                raise InvalidRequest(message, param="embeds")
            self._embeds.append(embeds)
        if (self.text is not None) + bool(self.token_ids) + bool(self._embeds) > 1:
            raise InvalidRequest("a raw prompt is text, token ids or embeds, and not several of them", param="prompt")

    def require_alone(self, others: Any) -> None:
        """Raise InvalidRequest if a conversation comes with the prompt. others: its messages."""
        if self and others:
            kind = "embeds" if self.is_embedded else "prompt"
            raise InvalidRequest(f"{kind}: it is a whole prompt: no messages come with them", param=kind)

    def tokens(self, tokenizer: Any, size: int, kwargs: TokenizationKwargs) -> list[int]:
        """Return the tokens of a text or of token ids.

        tokenizer: of transformers. size: how many tokens the model has. kwargs: the request's, for a text.
        Raises InvalidRequest: an id is not in the vocabulary.
        """
        tokens, param = self.token_ids, "prompt_token_ids"
        if self.text is not None:
            tokens = kwargs.cut(tokenizer.encode(self.text, add_special_tokens=kwargs.add_special_tokens))
            param = "prompt"
        refuse_unknown_tokens(tokens, size, param)
        return tokens

    def least_tokens(self, longest: int, kwargs: TokenizationKwargs = DEFAULT_TOKENIZATION) -> int:
        """Return how many tokens the prompt has at least.

        longest: characters of the longest token. kwargs: the request's, for a text.
        """
        if self.text is not None:
            return kwargs.least(math.ceil(len(self.text) / longest))
        return len(self.token_ids) or sum(map(len, self._embeds))

    def embeds(self, hidden: int, dtype: torch.dtype, repetition_penalty: float) -> Tensor:
        """Return the embeddings, (n, hidden), in ``dtype``.

        hidden: what the model takes. repetition_penalty: of the request.
        Raises InvalidRequest: they are not of that size, some numbers are beyond ``dtype``, or the request has a
        penalty, which counts tokens.
        """
        if repetition_penalty != 1.0:
            message = "a repetition penalty counts the prompt's tokens, and embeds have none"
            raise InvalidRequest(message, param="repetition_penalty")
        if found := [each.shape[1] for each in self._embeds if each.shape[1] != hidden]:
            raise InvalidRequest(f"embeds: rows of {found[0]} numbers; the model takes {hidden}", param="embeds")
        embeds = torch.cat([each.to(dtype) for each in self._embeds])
        if not embeds.isfinite().all():
            taken = str(dtype).removeprefix("torch.")
            raise InvalidRequest(f"embeds: some numbers are not finite as {taken}", param="embeds")
        return embeds
