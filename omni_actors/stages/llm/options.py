"""The options and request parameters that ``llm`` has besides those of all text-generating engines."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from omni_actors.stages.autoregressive.options import TextOptions, TextParams
from omni_actors.stages.bounds import Count, Settings

Tools: TypeAlias = Annotated[tuple[Settings, ...], Meta(max_length=128)]
"""Functions that the model may call, as in OpenAI's chat API. The chat template renders them."""


class LLMOptions(TextOptions, frozen=True, forbid_unknown_fields=True):
    """The options of ``llm``."""

    prefix_cache_mb: Count = 0
    """Megabytes of keys and values that are kept of prompts; 0: none. A prompt that begins like an earlier one, for
    whole prefill chunks, need not compute this beginning again."""


class LLMParams(TextParams, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``llm``."""

    tools: Tools = ()
    pooling: Literal["mean", "last"] | None = None
    """What to make of the hidden states of the prompt's positions in place of an answer: one embedding."""
    normalize: bool = True
    """Whether an embedding has the length 1."""
