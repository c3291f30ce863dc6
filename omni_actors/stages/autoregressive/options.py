"""The options and request parameters that all text-generating engines on transformers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from omni_actors.stages import bounds
from omni_actors.stages.adapters.options import Lora


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of an engine that generates text with continuous batching."""

    max_batch: bounds.Positive = 8
    """Requests that one forward decodes; more requests wait."""
    context: bounds.Positive = 2048
    """Tokens that one request may use, prompt and completion together."""
    prefill_chunk: bounds.Positive = 256
    """Prompt tokens that one step prefills, so that a long prompt does not delay the decoding of other requests."""
    dtype: bounds.Dtype = "float32"
    system_prompt: str = ""
    """System message for a conversation that has none."""
    idle_loras: bounds.Count = 8
    """LoRA adapters whose weights stay in memory while no request uses them; pinned ones are not counted."""
    prefix_cache_mb: bounds.Count = 0
    """Megabytes of keys and values that are kept of prompts; 0: none. A prompt that begins like an earlier one, for
    whole prefill chunks, need not compute this beginning again. A thinker keeps the rows for its talker with them, and
    leaves prompts with media out."""


Role = Literal["both", "prefill", "decode"]
"""What a stage does of a language model's work."""


class SplitOptions(TextOptions, frozen=True, forbid_unknown_fields=True):
    """The options of an engine that may prefill and decode in two stages (see ``roles``)."""

    role: Role = "both"
    """"prefill": the stage computes prompts, and sends their keys and values to a stage of the same model with the role
    "decode", which writes the answers."""
    chunk_layers: bounds.Count = 0
    """With the role "prefill": how many layers of a prefill chunk's keys and values travel in one chunk; 0: all."""
    waiting_prompts_mb: bounds.Positive | None = None
    """With the role "decode": megabytes of host memory for prompts that are not in the cache yet. None: as many as the
    cache takes for ``max_batch`` requests of ``context`` tokens. A request whose prompt has no room is refused, and may
    be sent again."""


MOST_CUT = 8192
"""A prompt of certainly more tokens is not cut to fit: it is tokenized as a whole first, and all requests wait."""


class TokenizationKwargs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a tokenizer that a client may choose, by transformers' names."""

    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to a raw text. A conversation has those of its template."""
    truncation: bool = False
    """Whether a prompt of more than ``max_length`` tokens is cut; one that is far too long is refused."""
    max_length: bounds.Tokens | None = None
    truncation_side: Literal["left", "right"] = "right"
    """Which tokens are cut off."""

    def least(self, tokens: int) -> int:
        """Return how many tokens have to fit into the context, of a prompt that has at least ``tokens``."""
        uncut = not self.truncation or self.max_length is None or tokens > MOST_CUT
        return tokens if uncut or self.max_length is None else min(tokens, self.max_length)

    def cut(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that are kept."""
        if not self.truncation or self.max_length is None or len(tokens) <= self.max_length:
            return list(tokens)
        return list(tokens[: self.max_length] if self.truncation_side == "right" else tokens[-self.max_length :])


DEFAULT_TOKENIZATION = TokenizationKwargs()


class TextParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request parameters of an engine that generates text."""

    max_tokens: bounds.Tokens = 256
    temperature: bounds.Temperature = 0.0
    """0 is greedy."""
    top_p: bounds.TopP = 1.0
    top_k: bounds.TopK = 0
    """0 means no limit."""
    seed: bounds.Seed | None = None
    """None: the parent draws a seed on admission, so that a replay draws the same tokens."""
    stop: Annotated[tuple[bounds.StopString, ...], Meta(max_length=16)] = ()
    """Strings that end the answer. The number is bounded because each new piece of text is compared with all."""
    repetition_penalty: bounds.Penalty = 1.0
    """Applies to tokens that the prompt or the answer already has; 1 has no effect."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Excludes tokens that are less likely than this part of the most likely token's probability."""
    min_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """The model cannot choose an end token, or one of ``stop_token_ids``, before this many tokens."""
    ignore_eos: bool = False
    """Whether the answer continues after the model's end tokens."""
    stop_token_ids: Annotated[tuple[bounds.TokenId, ...], Meta(max_length=256)] = ()
    """More tokens that end the answer. They are not part of its text."""
    presence_penalty: bounds.CountPenalty = 0.0
    """Subtracted from the logits of the tokens that the answer already has."""
    frequency_penalty: bounds.CountPenalty = 0.0
    """Subtracted from the logit of a token as many times as the answer has the token."""
    logit_bias: bounds.LogitBias | None = None
    """Numbers that are added to the logits of tokens, by token id."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """How many of the most likely tokens each output token reports with their log probabilities. None: no report."""
    structured_outputs: bounds.Settings | None = None
    """The form of the answer: json (a schema), json_object, regex, choice or grammar; vLLM takes structural_tag too."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    lora: Lora | None = None
    """The LoRA adapter of this request."""
    tokenization_kwargs: TokenizationKwargs = TokenizationKwargs()
    """How the tokenizer reads the prompt."""
    priority: bounds.Priority = 0
    """A waiting request with a lower number comes first in the engine."""


class GuidedParams(TextParams, frozen=True, forbid_unknown_fields=True):
    """The request parameters of an engine whose answers may be guided by a negative prompt (see ``guidance``)."""

    guidance_scale: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """How strongly the answer follows the prompt and avoids what the negative prompt leads to; 1: no guidance. A guided
    request takes two of the engine's ``max_batch`` rows."""
    negative_prompt: Annotated[str, Meta(max_length=1_000_000)] | None = None
    """For guidance: a question that the chat template renders or, if the prompt is a raw prompt, a raw text. None: the
    prompt's last token."""
