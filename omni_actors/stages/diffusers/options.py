"""The options and request parameters of the ``diffusers`` engine."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from omni_actors.stages import bounds
from omni_actors.stages.adapters.options import Lora
from omni_actors.stages.diffusion.options import ImageParams

PROMPT_CHARACTERS = 8192
"""The longest prompt. A pipeline cuts what its text encoder cannot take: CLIP takes 77 tokens, T5 some hundred."""


class DiffusersOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``diffusers``."""

    max_running: bounds.Positive = 4
    """Requests whose steps alternate; more wait. Each keeps its latents and its prompt's hidden states in memory. With
    1, a request waits for those before it: for a pipeline whose modules keep something from one step to the next."""
    max_pixels: bounds.Positive = 2048 * 2048
    """The largest width times height of a picture, and of a picture in a request."""
    max_steps: bounds.Positive = 100
    """The most denoising steps of a request."""
    max_frames: bounds.Positive = 128
    """The most frames of a video."""
    max_images: bounds.Positive = 3
    """The most input pictures of a request."""
    variant: Annotated[str, Meta(pattern="^[a-z0-9_]+$")] | None = None
    """Load the weights with this word in their files' names, such as "fp16", where there are such files."""
    dtype: bounds.Dtype = "float32"
    idle_loras: bounds.Count = 8
    """LoRA adapters whose weights stay in memory while no request uses them; pinned ones are not counted."""


class DiffusersParams(ImageParams, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``diffusers``. One that the pipeline's call does not have is refused."""

    negative_prompt: Annotated[str, Meta(max_length=PROMPT_CHARACTERS)] | None = None
    """What the picture is to be kept away from, by guidance."""
    lora: Lora | None = None
    """The LoRA adapter to denoise with, of the pipeline's transformer or U-Net."""
    pipeline_kwargs: bounds.Settings = msgspec.field(default_factory=dict)
    """More arguments of the pipeline's call: numbers, booleans and texts, such as ``num_frames`` of a video."""
