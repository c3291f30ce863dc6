"""The request parameters that language models have besides those of all text-generating engines."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from omni_actors.stages.autoregressive.options import GuidedParams
from omni_actors.stages.bounds import ChatTemplateKwargs, Settings

Tools: TypeAlias = Annotated[tuple[Settings, ...], Meta(max_length=128)]
"""Functions that the model may call, as in OpenAI's chat API. The chat template renders them."""


class LLMParams(GuidedParams, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``llm``."""

    tools: Tools = ()
    chat_template_kwargs: ChatTemplateKwargs = msgspec.field(default_factory=dict)
    """Variables of the chat template. One that it does not read has no effect."""
    pooling: Literal["mean", "last"] | None = None
    """What to make of the hidden states of the prompt's positions in place of an answer: one embedding."""
    normalize: bool = True
    """Whether an embedding has the length 1."""
