"""The options and request parameters that thinkers and talkers of omni models share.

A thinker is the part of an omni model that reads all input and writes text; its options are ``SplitOptions``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from omni_actors.stages.adapters.options import Lora
from omni_actors.stages.autoregressive.options import GuidedParams
from omni_actors.stages.bounds import (
    ChatTemplateKwargs,
    Count,
    Dtype,
    Name,
    Penalty,
    Positive,
    Priority,
    Seed,
    Temperature,
    Tokens,
    TopK,
    TopP,
)

Pixels = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class MMProcessorKwargs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a processor of media that a client may choose, by transformers' names.

    None means what the checkpoint's processor does.
    """

    min_pixels: Pixels | None = None
    """Fewest pixels of an image or a frame, which is enlarged to them."""
    max_pixels: Pixels | None = None
    """Most pixels of an image or a frame, which is shrunk to them."""
    fps: Annotated[float, Meta(gt=0, le=60)] | None = None
    """Frames that are taken of each second of a video. None: 2."""


DEFAULT_MEDIA = MMProcessorKwargs()


class ThinkerParams(GuidedParams, frozen=True, forbid_unknown_fields=True):
    """The request parameters of a thinker."""

    use_audio_in_video: bool = False
    """Whether the model also gets the sound of each video."""
    mm_processor_kwargs: MMProcessorKwargs = MMProcessorKwargs()
    """How images and videos are prepared for the model."""
    chat_template_kwargs: ChatTemplateKwargs = msgspec.field(default_factory=dict)
    """As for ``llm``."""


class TalkerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a talker: the part of an omni model that turns its text into codes of speech."""

    max_batch: Positive = 8
    """Requests that one forward decodes; more requests wait."""
    context: Positive = 4096
    """Positions that one request may use, prompt and frames together."""
    prefill_chunk: Positive = 256
    """Prompt positions that one step prefills."""
    dtype: Dtype = "float32"
    idle_loras: Count = 8
    """LoRA adapters whose weights stay in memory while no request uses them; pinned ones are not counted."""


class TalkerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The names differ from the thinker's, so that a parameter for the text does not change the voice."""

    speaker: Name | None = None
    """A speaker of the checkpoint, in upper or lower case. None: "Ethan", or the checkpoint's first speaker."""
    talker_max_tokens: Tokens = 4096
    """Frames of speech. Speech that this limit ends has one frame less."""
    talker_temperature: Temperature = 0.9
    talker_top_k: TopK = 50
    talker_top_p: TopP = 1.0
    talker_repetition_penalty: Penalty = 1.05
    """Applies to first codes that were already generated."""
    seed: Seed | None = None
    priority: Priority = 0
    """A waiting request with a lower number comes first in the engine."""
    lora: Lora | None = None
    """The LoRA adapter of this request."""
