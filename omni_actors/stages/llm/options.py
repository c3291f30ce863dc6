"""The request parameters that language models have besides those of all text-generating engines."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from omni_actors.stages.autoregressive.options import TextParams
from omni_actors.stages.bounds import Settings

Tools: TypeAlias = Annotated[tuple[Settings, ...], Meta(max_length=128)]
"""Functions that the model may call, as in OpenAI's chat API. The chat template renders them."""


class LLMParams(TextParams, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``llm``."""

    tools: Tools = ()
    pooling: Literal["mean", "last"] | None = None
    """What to make of the hidden states of the prompt's positions in place of an answer: one embedding."""
    normalize: bool = True
    """Whether an embedding has the length 1."""
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """How strongly the answer follows the prompt and avoids what the negative prompt leads to; 1: no guidance. A guided
    request takes two of the engine's ``max_batch`` rows."""
    negative_prompt: Annotated[str, Meta(max_length=1_000_000)] | None = None
    """For guidance: a question that the chat template renders or, if the prompt is a raw prompt, a raw text. None: the
    prompt's last token."""
